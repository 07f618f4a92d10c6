"""``python -m vllm_fp4_plugin``: quantise a checkpoint, or report what would run it."""

import typer

from vllm_fp4_plugin.quantizer.command import quantize
from vllm_fp4_plugin.report_command import report

app = typer.Typer(
    help="NVFP4 for vLLM: quantise a checkpoint, or report which kernel every layer would get.",
    no_args_is_help=True,
    add_completion=False,
)
app.command()(quantize)
app.command()(report)

if __name__ == "__main__":
    app(prog_name="python -m vllm_fp4_plugin")
