"""``python -m nvfp4_kernels check``: check the kernels' results on this GPU, and time them."""

from pathlib import Path
from typing import Annotated

import typer

from nvfp4_kernels.tool.console import nothing_printed, output, print_json, progress_bar, refusals
from nvfp4_kernels.tool.options import JsonOption


def check(
    out: Annotated[Path, typer.Option(help="Markdown; JSON goes beside it.")] = Path("check.md"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes.")] = False,
    limit: Annotated[float, typer.Option(min=1, help="Seconds for one task.")] = 60,
    as_json: JsonOption = False,
) -> None:
    """Check and time the main ops on this GPU, of the sm_100 family, and write a report.

    On sm_90 the tasks are the ops that write E4M3 alone.

    Tasks run in a separate process, which is replaced if a task hangs, crashes or fails. The exit
    status is 1 if a task fails.

    Fields of --json: device (name, arch, sms, memory_gb, driver, cuda, torch, compiler, host);
    outcomes, a list of section, name, error (empty: none), figures and seconds; tasks and failed,
    the numbers of all tasks and of failed tasks; files, the report's paths.
    """
    from nvfp4_kernels.tool.check import (
        WrongDevice,
        document,
        run_all,
        tasks_of,
        this_device,
        write,
    )
    from nvfp4_kernels.tool.cuda_machine import CudaMachine
    from nvfp4_kernels.tool.destination import check_file
    from nvfp4_kernels.tool.task import Isolated, Outcome

    with nothing_printed(), refusals(WrongDevice, OSError):
        device = this_device()
        check_file("--out", out)
        tasks = tasks_of(device.arch, quick)
        isolated = Isolated(CudaMachine, limit)
        with progress_bar() as bar:
            task = bar.add_task("tasks", total=len(tasks))

            def done(outcome: Outcome) -> None:
                bar.advance(task)
                if outcome.error:
                    bar.console.print(
                        f"{outcome.name}: {outcome.error}",
                        style="red", markup=False, highlight=False, soft_wrap=True,
                    )  # fmt: skip

            try:
                outcomes = run_all(tasks, isolated, done)
            finally:
                isolated.close()
        written = [str(path) for path in write(out, device, outcomes)]
    failed = sum(bool(outcome.error) for outcome in outcomes)
    if as_json:
        counts = {"tasks": len(outcomes), "failed": failed, "files": written}
        print_json(document(device, outcomes) | counts)
    else:
        output().print(f"{len(outcomes)} tasks, {failed} failed: {', '.join(written)}")
    if failed:
        raise typer.Exit(1)
