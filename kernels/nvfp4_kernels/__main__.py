"""``python -m nvfp4_kernels``: build kernels ahead of time, report on them, check them on a GPU."""

import typer

from nvfp4_kernels.tool.build_command import build
from nvfp4_kernels.tool.check_command import check
from nvfp4_kernels.tool.report_command import report
from nvfp4_kernels.tool.version_option import VersionOption

app = typer.Typer(
    help="NVFP4 kernels: build them before a server starts, see what they are made of, check them.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def main(version: VersionOption = False) -> None:
    """Take the options that stand before a command."""


app.command()(build)
app.command()(report)
app.command()(check)

if __name__ == "__main__":
    app(prog_name="python -m nvfp4_kernels")
