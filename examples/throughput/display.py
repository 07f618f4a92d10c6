"""Terminal output of the comparison."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from examples.throughput.job import Progress as Told
from examples.throughput.results import Rate, Results

# In a file or a pipe, rows do not wrap.
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


@contextmanager
def measuring(rounds: int) -> Iterator[Callable[[str, int, Told], None]]:
    """Progress bar for each engine; yields the callback that advances it."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        tasks: dict[tuple[str, int], int] = {}

        def on_progress(name: str, number: int, told: Told) -> None:
            if (name, number) not in tasks:
                for task in tasks.values():
                    progress.stop_task(task)  # type: ignore[arg-type]
                tasks[name, number] = progress.add_task(name, total=told.total or None)
            title = name if rounds == 1 else f"{name}, round {number} of {rounds}"
            progress.update(
                tasks[name, number],  # type: ignore[arg-type]
                description=f"{title}: {'failed' if told.error else told.state}",
                completed=told.done,
                total=told.total or None,
            )

        yield on_progress


def results(measured: Results) -> None:
    """Print heading and table, then the kernels that ran, then the failures."""
    for line in heading(measured):
        console.print(line, markup=False, soft_wrap=True)
    table = Table(
        title="tokens per second: generated in decode cases, of prompts in prefill cases",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("case", no_wrap=True)
    for variant in measured.variants:
        table.add_column(variant.name, justify="right")
        table.add_column("", justify="right", style="dim", no_wrap=True)
        if variant.name != measured.baseline:
            table.add_column("×", justify="right", no_wrap=True)
    for case in measured.cases:
        cells: list[Text] = [Text(case.title)]
        for variant in measured.variants:
            rate = measured.rate(variant, case)
            cells += _cells(rate, variant.name == measured.baseline, bool(variant.errors))
        table.add_row(*cells)
    console.print(table)
    console.print(
        f"Median of all repeats, half their range, and how many times the rate of "
        f"{measured.baseline}.",
        style="dim",
    )
    if warning := measured.warning():
        console.print(warning)
    for variant in measured.variants:
        for line in variant.kernels:
            own = line if line.startswith(variant.name) else f"{variant.name}: {line}"
            console.print(own, markup=False, style="dim", soft_wrap=True)
    for variant in measured.variants:
        for error in dict.fromkeys(variant.errors):
            where = variant.logs[-1] if variant.logs else "no log"
            console.print(
                f"{variant.name} failed: {error} ({where})",
                style="red", markup=False, soft_wrap=True,
            )  # fmt: skip


def heading(measured: Results) -> list[str]:
    """Heading: model, device, versions, tokens of prompt and output."""
    about = measured.about
    devices = dict.fromkeys(v.device for v in measured.variants if v.device)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    prompt = {case.prompt_tokens for case in measured.cases if not case.prefill}
    output = {case.output_tokens for case in measured.cases if not case.prefill}
    lines = [
        f"{about['model']} on {', '.join(devices) or 'an unknown device'}",
        f"{versions}, commit {about['commit'] or 'unknown'}",
    ]
    if prompt:
        [prompt_tokens], [output_tokens] = prompt, output
        lines.append(f"decode: {prompt_tokens} prompt tokens, {output_tokens} output tokens")
    return lines


def plain(text: str) -> None:
    """Print a line."""
    console.print(text, markup=False, soft_wrap=True)


def _cells(rate: Rate | None, baseline: bool, failed: bool) -> list[Text]:
    if rate is None:
        missing = Text("failed", style="red") if failed else Text("none")
        return [missing, Text("")] + [Text("")] * (not baseline)
    cells = [Text(f"{rate.median:,.0f}"), Text(f"±{rate.spread:.1%}")]
    if not baseline:
        style = "" if rate.ratio is None else "green" if rate.ratio >= 1 else "red"
        cells.append(Text("" if rate.ratio is None else f"{rate.ratio:.2f}", style=style))
    return cells
