"""``python -m vllm_fp4_plugin``: quantise or verify a checkpoint, report its kernels.

The module of each command only defines the options, and imports the rest when the command runs.
"""

from typing import Annotated

import typer

from nvfp4_kernels.tool import help
from vllm_fp4_plugin import versions
from vllm_fp4_plugin.commands import tried
from vllm_fp4_plugin.commands.catalogue import catalogue
from vllm_fp4_plugin.commands.doctor import doctor
from vllm_fp4_plugin.commands.report import report
from vllm_fp4_plugin.commands.verify import verify
from vllm_fp4_plugin.quantizer.command import quantize

app = help.application(
    "NVFP4 for vLLM: quantise a checkpoint, verify one, or report which kernel every layer would "
    "get."
)
for command in (quantize, report, verify, catalogue, doctor):
    app.command(cls=help.Command)(command)


def _print_versions(requested: bool) -> None:
    if requested:
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
    """Accept the options that precede a command."""


if __name__ == "__main__":
    app(prog_name="python -m vllm_fp4_plugin")
