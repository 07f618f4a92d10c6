"""Terminal output of the demo."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from examples.completions import Completion
from examples.demo.corpus import Corpus
from examples.demo.kernel_report import LayerKernel
from examples.demo.measurement import PROMPTS
from examples.demo.serve_commands import ServeCommands
from examples.demo.train import Progress as TrainProgress
from examples.stages import Stage

console = Console(highlight=False)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Spinner labelled ``what``, for a step of unknown length."""
    with _progress() as progress:
        progress.add_task(what, total=None)
        yield


@contextmanager
def training() -> Iterator[Callable[[TrainProgress], None]]:
    """Progress bar with loss and speed; yields the callback that advances it."""
    figures = TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s")
    with _progress(figures) as progress:
        task = progress.add_task("training", total=1.0, loss=float("nan"), speed=0.0)

        def on_step(state: TrainProgress) -> None:
            progress.update(
                task, completed=state.done, loss=state.loss, speed=state.tokens_per_second
            )

        yield on_step


@contextmanager
def serving(name: str, windows: int) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Spinner until the first callback, then a bar that the second advances; yields the two."""
    with _progress() as progress:
        start = progress.add_task(f"{name}: starting vllm serve", total=None)
        bar = progress.add_task(f"{name}: completions", total=windows, visible=False, start=False)

        def on_ready() -> None:
            progress.update(start, total=1, completed=1, description=f"{name}: server is ready")
            progress.start_task(bar)
            progress.update(bar, visible=True)

        def on_window() -> None:
            progress.update(bar, advance=1, description=f"{name}: held-out windows")

        yield on_ready, on_window


def rule(title: str) -> None:
    """Print the heading of one part of the run."""
    console.rule(title, align="left")


def corpus(text: Corpus) -> None:
    """Print the amount of text for training and of held-out text."""
    for side, documents in (("training", text.train), ("held-out", text.held_out)):
        characters = sum(len(document.text) for document in documents)
        console.print(f"{side} text: {len(documents)} files, {characters / 1e6:.2f} M characters")


def trained(parameters: int, last: TrainProgress) -> None:
    """Print the outcome of a training run."""
    console.print(
        f"{parameters / 1e6:.2f} M parameters, {last.steps} steps, "
        f"{last.tokens / 1e6:.2f} M tokens, "
        f"{last.tokens_per_second:,.0f} tokens/s, training loss {last.loss:.3f}"
    )


def stage(finished: Stage) -> None:
    """Print the folder of a stage, and whether the stage was made now."""
    how = "found in the cache" if finished.reused else f"made in {finished.seconds:.1f} s"
    console.print(f"{finished.name}: {how}, {finished.folder}", soft_wrap=True)


def completions(shown: Sequence[Completion]) -> None:
    """Print each prompt in a box, and the model's continuation in a box below."""
    for completion in shown:
        table = Table(box=box.ROUNDED, show_header=False, show_lines=True, expand=True)
        table.add_column(no_wrap=True, style="dim")
        table.add_column(overflow="fold", ratio=1)
        table.add_row("prompt", Text(completion.prompt))
        # A continuation begins in the middle of a line, and may end with empty lines.
        table.add_row(f"answer\n{completion.tokens} tokens", Text(completion.text.rstrip(), "bold"))
        console.print(table)


def kernels(report: Sequence[LayerKernel]) -> None:
    """Print the kernel of each layer, as reported by the server."""
    for row in report:
        console.print(f"nvfp4-tc: {row.layer} ×{row.count}: {row.kernel}", markup=False)


def models(rows: Sequence[dict[str, Any]], tokens: int) -> None:
    """Print the comparison of the served models."""
    title = f"Served models; perplexity (ppl) over {tokens:,} held-out tokens"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    at_once = f"{len(PROMPTS)} at once"
    for heading in ("model", "MiB", "ppl", "Δ log ppl", "95% interval", "tok/s", at_once):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in rows:
        above = row["log_perplexity_above_bf16"]
        table.add_row(
            row["model"],
            f"{row['checkpoint_bytes'] / 2**20:.2f}",
            f"{row['perplexity']:.3f}",
            f"{above['estimate']:+.4f}" if above else "",
            f"[{above['low']:+.4f}, {above['high']:+.4f}]" if above else "",
            f"{row['tokens_per_second']:.0f}",
            f"{row['tokens_per_second_at_once']:.0f}",
        )
    if any("reference" in kernel["kernel"] for row in rows for kernel in row["kernels"]):
        table.caption = "Reference kernels are exact, not fast: these are no GPU speeds."
    console.print(table)


def kept(figures: Path, checkpoints: Mapping[str, Path]) -> None:
    """Print the paths of the files that stay after the run."""
    rule("What was made stays here")
    for what, path in {**checkpoints, "figures": figures}.items():
        console.print(f"{what}: {path}", markup=False, soft_wrap=True)


def commands(made: ServeCommands) -> None:
    """Print commands, each as one shell line."""
    rule("To serve it, and to ask it from another terminal")
    for command in made:
        console.print(f"\n{command}", markup=False, soft_wrap=True)


def times(rows: Sequence[dict[str, Any]]) -> None:
    """Print the seconds of each stage."""
    table = Table(title="Time", box=box.SIMPLE_HEAD)
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    table.add_column("")
    for row in rows:
        table.add_row(
            row["stage"], f"{row['seconds']:.1f}", "from the cache" if row["reused"] else ""
        )
    console.print(table)


def _progress(*columns: TextColumn) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        *columns,
        TimeElapsedColumn(),
        console=console,
    )
