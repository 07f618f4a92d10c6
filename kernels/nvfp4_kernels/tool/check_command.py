"""``python -m nvfp4_kernels check``: are the kernels right on this GPU, and how fast are they?"""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from nvfp4_kernels.tool.check import WrongDevice, correctness, run_all, this_device, timings, write
from nvfp4_kernels.tool.console import console, progress_bar, refusals
from nvfp4_kernels.tool.cuda_machine import CudaMachine
from nvfp4_kernels.tool.destination import check_file
from nvfp4_kernels.tool.task import Isolated, Outcome


def check(
    out: Annotated[Path, typer.Option(help="Markdown; JSON goes beside it.")] = Path("check.md"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes.")] = False,
    limit: Annotated[float, typer.Option(min=1, help="Seconds for one task.")] = 60,
) -> None:
    """Check every op on this GPU against its formula, time it, and write a report; sm_100 alone.

    Each task runs in a process that may hang or die without harm to the next. Ends with status 1 if
    any of them fails.
    """
    screen = console()
    with refusals(WrongDevice, OSError):
        device = this_device()
        check_file("--out", out)
        tasks = [*correctness(quick), *timings(quick)]
        isolated = Isolated(CudaMachine, limit)
        with progress_bar() as bar:
            task = bar.add_task("tasks", total=len(tasks))

            def done(outcome: Outcome) -> None:
                bar.advance(task)
                if outcome.error:
                    bar.console.print(f"[red]{escape(outcome.name)}: {escape(outcome.error)}[/]")

            try:
                outcomes = run_all(tasks, isolated, done)
            finally:
                isolated.close()
        written = write(out, device, outcomes)
    failed = sum(bool(outcome.error) for outcome in outcomes)
    files = ", ".join(map(str, written))
    screen.print(f"{len(outcomes)} tasks, {failed} failed: {files}")
    if failed:
        raise typer.Exit(1)
