"""``python -m nvfp4_kernels``: build kernels ahead of time, report on them, check them on a GPU.

Each command's module defines its options; the code that does the work is imported when the
command runs.
"""

from nvfp4_kernels.tool import help
from nvfp4_kernels.tool.build_command import build
from nvfp4_kernels.tool.check_command import check
from nvfp4_kernels.tool.report_command import report
from nvfp4_kernels.tool.version_option import VersionOption

app = help.application(
    "NVFP4 kernels: build them before a server starts, print their resources, check them."
)


@app.callback()
def main(version: VersionOption = False) -> None:
    """Accept the options that precede a command."""


for command in (build, report, check):
    app.command(cls=help.Command)(command)

if __name__ == "__main__":
    app(prog_name="python -m nvfp4_kernels")
