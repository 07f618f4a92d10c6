"""``python -m vllm_fp4_plugin``: quantise or verify a checkpoint, report what would run it."""

from typing import Annotated

import typer

from vllm_fp4_plugin import versions
from vllm_fp4_plugin.commands import tried
from vllm_fp4_plugin.commands.catalogue import catalogue
from vllm_fp4_plugin.commands.doctor import doctor
from vllm_fp4_plugin.commands.report import report
from vllm_fp4_plugin.commands.verify import verify
from vllm_fp4_plugin.quantizer.command import quantize

app = typer.Typer(
    help="NVFP4 for vLLM: quantise a checkpoint, verify one, or report which kernel every layer "
    "would get.",
    no_args_is_help=True,
    add_completion=False,
)
app.command()(quantize)
app.command()(report)
app.command()(verify)
app.command()(catalogue)
app.command()(doctor)


def _print_versions(asked: bool) -> None:
    if asked:
        typer.echo("\n".join([*versions.lines(), tried.verdict(tried.here())]))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_versions,
            is_eager=True,
            help="Print the versions of the plugin, vLLM, torch and CuTe DSL.",
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


if __name__ == "__main__":
    app(prog_name="python -m vllm_fp4_plugin")
