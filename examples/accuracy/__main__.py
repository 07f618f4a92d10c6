"""``python -m examples.accuracy``: accuracy loss of a model's quantised variants, as served."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from examples.command_line import refusals, server_words

if TYPE_CHECKING:
    from examples.accuracy.run import Options

CACHE = Path(__file__).parents[2] / ".cache" / "accuracy"
TASKS_HELP = "Tasks of lm-evaluation-harness, with commas between."
VARIANTS_HELP = (
    "What to compare with bf16, with commas between: names (see `variants`), or "
    "LABEL[:METHOD]=CHECKPOINT. By default those that suit the machine."
)

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="markdown")


@app.command()
def measure(
    model: Annotated[Path, typer.Argument(help="Folder of a 16-bit checkpoint.")],
    text: Annotated[Path, typer.Option(help="UTF-8 text to measure on.")],
    calibrate: Annotated[
        Path | None, typer.Option(help="Text on which scales of activations are measured.")
    ] = None,
    variants: Annotated[str, typer.Option(help=VARIANTS_HELP)] = "",
    tasks: Annotated[str, typer.Option(help=TASKS_HELP)] = "",
    task_limit: Annotated[int | None, typer.Option(min=1, help="Samples of each task.")] = None,
    local_tasks: Annotated[
        Path | None,
        typer.Option(help="Folder of `python -m examples.accuracy.tasks`; made if not given."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for results, logs and all that is made on the way.")
    ] = Path("accuracy"),
    windows: Annotated[int, typer.Option(min=2, help="Windows of the text.")] = 32,
    window_length: Annotated[int, typer.Option(min=4, help="Tokens in each.")] = 512,
    server_options: Annotated[
        str, typer.Option(help="More options of `vllm serve`, for every variant.")
    ] = "",
    server_time_limit: Annotated[
        float, typer.Option(min=1, help="Seconds until a server must be ready.")
    ] = 1800,
    fresh: Annotated[bool, typer.Option("--fresh", help="Make and measure all anew.")] = False,
) -> None:
    """Make a model's variants, serve each with vLLM, and compare them with the 16-bit checkpoint.

    Compared are the perplexity of a text, the divergence and top-1 agreement of next-token
    distributions, and task scores. A second run with the same --out measures only variants that
    have changed since.

    A variant is marked as wrong, and the command ends with status 1, if a stored weight is more
    than 20 % off the 16-bit weight or 3 % larger or smaller (NVFP4 rounds by 8 to 10 %), or if the
    variant diverges more than 3 times as far as a yardstick: the 16-bit model with the same tensors
    rounded to NVFP4 and back, served as `rounded-weights` and `rounded-both`. A variant that rounds
    nothing may diverge no further than `rounded-weights`, one with FP8 activations twice as far.
    """
    _start()
    from examples.accuracy.run import Options

    def options() -> Options:
        return Options(
            model=model.resolve(),
            variants=_split(variants),
            text=text,
            calibrate=calibrate.resolve() if calibrate else None,
            tasks=_split(tasks),
            task_limit=task_limit,
            local_tasks=local_tasks.resolve() if local_tasks else None,
            out=out.resolve(),
            windows=windows,
            window_length=window_length,
            server_options=server_words(server_options),
            server_time_limit=server_time_limit,
            fresh=fresh,
        )

    _run(options)


@app.command()
def show(
    results: Annotated[Path, typer.Argument(help="results.json that `measure` has written.")],
    plot: Annotated[Path | None, typer.Option(help="PNG file to draw.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="File to write the tables into.")] = None,
) -> None:
    """Show results that `measure` has written, on this or another machine."""
    from examples.accuracy import display
    from examples.accuracy.markdown import markdown as as_markdown
    from examples.accuracy.results import Results
    from examples.paths import check_file
    from examples.versions import check_importable

    with refusals():
        measured = Results.read(results)
        if markdown:
            check_file(markdown, "--markdown")
        if plot:
            check_importable("matplotlib", "--plot")
            check_file(plot, "--plot")
            from examples.accuracy.plot import plot as draw

            draw(measured, plot)
        if markdown:
            markdown.write_text(as_markdown(measured))
    display.results(measured)


@app.command()
def variants() -> None:
    """List the named variants."""
    from examples.accuracy.variants import DEFAULT_CPU, DEFAULT_GPU, known_variants

    for name, variant in known_variants("vLLM's attention").items():
        typer.echo(f"{name:30} {variant.title}{', GPU only' if variant.needs_gpu else ''}")
    typer.echo(f"by default on a CPU: {', '.join(DEFAULT_CPU)}")
    typer.echo(f"by default on a GPU: {', '.join(DEFAULT_GPU)}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where everything made is kept.")] = CACHE,
    variants: Annotated[str, typer.Option(help=VARIANTS_HELP)] = "",
    tasks: Annotated[str | None, typer.Option(help=f"{TASKS_HELP} The local ones.")] = None,
    task_limit: Annotated[int | None, typer.Option(min=1, help="Samples of each task.")] = 40,
    windows: Annotated[int, typer.Option(min=2, help="Windows of the text.")] = 24,
    train_seconds: Annotated[float, typer.Option(min=1, help="Time to train for.")] = 60,
    fresh: Annotated[bool, typer.Option("--fresh", help="Make and measure all anew.")] = False,
) -> None:
    """Train the demo's small model, and measure its variants: no GPU, no network.

    A second run reuses the model and the earlier measurements.
    """
    _start()
    started = time.monotonic()
    # For a model this small, starting one process less outweighs the benefit of an engine process.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from examples.accuracy.run import Options, check_tasks
    from examples.accuracy.small_model import make_small_model
    from examples.accuracy.tasks import NAMES
    from examples.accuracy.variants import parse_variants
    from examples.paths import check_folder
    from examples.server import start_limit
    from examples.versions import check_vllm

    limit = start_limit(time.monotonic() - started)
    wanted = NAMES if tasks is None else _split(tasks)

    def options() -> Options:
        # Check for mistakes before the model is trained.
        parse_variants(_split(variants), "")
        check_tasks(wanted, None)
        check_folder(out, "--out")
        check_vllm()
        made = make_small_model(out.resolve(), train_seconds, fresh)
        return Options(
            model=made.checkpoint,
            variants=_split(variants),
            text=made.held_out,
            calibrate=made.calibration,
            tasks=wanted,
            task_limit=task_limit,
            local_tasks=None,
            out=out.resolve(),
            windows=windows,
            server_time_limit=limit,
            fresh=fresh,
        )

    _run(options)


def _start() -> None:
    """Set the SIGTERM handler, and ``OMP_WAIT_POLICY``, which torch reads when it is loaded.

    The commands therefore import torch later.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Threads that spin while they wait halve the speed where anything else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _run(options: "Callable[[], Options]") -> None:
    """Measure and show; draw if matplotlib is installed; then exit.

    The status is 1 if the options are refused, or a variant failed or is wrong, else 0.
    """
    from importlib.util import find_spec

    from examples.accuracy import display
    from examples.accuracy.run import run

    with refusals("what was measured is kept"):
        given = options()
        results = run(given)
    display.results(results)
    if find_spec("matplotlib") and len([v for v in results.variants if v.windows]) > 1:
        from examples.accuracy.plot import plot

        plot(results, given.out / "accuracy.png")
        display.plain(f"plot: {given.out / 'accuracy.png'}")
    display.plain(f"all figures: {given.out / 'results.json'}")
    raise typer.Exit(int(results.failed))


if __name__ == "__main__":
    app(prog_name="python -m examples.accuracy")
