"""Models the time of NVIDIA's examples, and holds the model against published measurements.

python -m tests.emulator.timing parameters
python -m tests.emulator.timing example SCRIPT --arguments "--mnkl 512,512,512,1" --timeline t.json
python -m tests.emulator.timing calibrate [--cutlass PATH]
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tests.emulator.timing import calibrate as calibration
from tests.emulator.timing.example import MARK
from tests.emulator.timing.parameters import B200_TIMING, H200_TIMING
from tests.emulator.timing.report import parameter_table, show

app = typer.Typer(add_completion=False, help=__doc__)


class Chip(StrEnum):
    """Chips with a table of parameters."""

    B200 = "b200"
    H200 = "h200"


@app.command()
def parameters(
    chip: Annotated[Chip, typer.Option(help="whose parameters")] = Chip.B200,
) -> None:
    """Prints every parameter with its source."""
    show(parameter_table(H200_TIMING if chip is Chip.H200 else B200_TIMING))


@app.command()
def example(
    script: Annotated[Path, typer.Argument(help="one of CuTe DSL's example scripts")],
    arguments: Annotated[str, typer.Option(help="its command line")] = "",
    sms: Annotated[int, typer.Option(help="streaming multiprocessors to emulate")] = 148,
    clusters: Annotated[int, typer.Option(help="of the grid to extrapolate to; 0: those run")] = 0,
    footprint: Annotated[float, typer.Option(help="bytes from HBM; -1: all live tensors")] = -1,
    only: Annotated[str, typer.Option(help="kernels whose name contains this")] = "",
    timeline: Annotated[str, typer.Option(help="file for the last launch's Perfetto JSON")] = "",
) -> None:
    """Run an example and print the modelled time of each of its launches."""
    lines = calibration.run_example(script, arguments, sms, clusters, footprint, only, timeline)
    for line in lines:
        if not line.startswith(MARK):
            print(line)


@app.command()
def calibrate(
    cutlass: Annotated[Path | None, typer.Option(help="checkout of NVIDIA/cutlass")] = None,
) -> None:
    """Prints the model's errors against published measurements."""
    show(calibration.multiplies())
    show(calibration.copies())
    show(calibration.streams())
    if cutlass is not None:
        show(calibration.kernels(cutlass))


if __name__ == "__main__":
    app()
