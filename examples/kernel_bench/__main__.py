"""``python -m examples.kernel_bench``: our GEMMs against cuBLAS, Humming and Marlin.

``measure`` needs a GPU, torch and ``nvfp4_kernels``, and writes JSON; ``show`` needs no GPU, and
makes the table, the plot and markdown from the JSON file.
"""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from examples.command_line import refusals
from examples.kernel_bench.results import CONTENDERS, Results, Sample
from examples.llama_shapes import SHAPES
from examples.paths import check_file
from examples.versions import check_importable

TOKENS = tuple(2**power for power in range(14))  # 1 to 8192


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    top = argparse.ArgumentParser(prog="python -m examples.kernel_bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("measure", help="time the kernels on this machine's GPU")
    measure.add_argument(
        "--model", default="llama-8b", help=f"{', '.join(SHAPES)}, or a config.json"
    )
    measure.add_argument("--layers", nargs="+", help="names of the layers; default: all")
    measure.add_argument(
        "--m", nargs="+", type=_positive, default=TOKENS, help="numbers of tokens; 1 to 8192"
    )
    measure.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS,
    )  # fmt: skip
    measure.add_argument("--rounds", type=_positive, default=20, help="replays of each contender")
    measure.add_argument("--out", type=Path, default=Path("kernel_bench.json"))
    show = commands.add_parser("show", help="table, plot and markdown of measured results")
    show.add_argument("results", type=Path, help="what `measure` has written")
    show.add_argument("--plot", type=Path, help="PNG file to draw")
    show.add_argument("--markdown", type=Path, help="file to write the table into")
    return top


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a positive number")
    return int(text)


def measure(given: argparse.Namespace) -> int:
    """Measure; write the results after every case; return 1 if our kernel is wrong or refused."""
    from examples.kernel_bench import machine
    from examples.kernel_bench.contenders import (
        Contender,
        Unavailable,
        make_contender,
        torch_silu_and_mul,
        vllm_silu_and_mul,
    )
    from examples.kernel_bench.layers import read_layers
    from examples.kernel_bench.measure import measure as measure_layers

    check_file(given.out, "--out")
    layers = read_layers(given.model, given.layers)
    device = machine.cuda_device()
    notes = []
    try:
        silu_and_mul = vllm_silu_and_mul()
    except Unavailable as missing:
        silu_and_mul = torch_silu_and_mul
        notes.append(f"SiLU-and-multiply after a product is torch's, in two launches: {missing}")
    contenders: dict[str, Contender] = {}
    for name in given.contenders:
        try:
            contenders[name] = make_contender(name, device, silu_and_mul)
        except Unavailable as missing:
            notes.append(f"{name} is left out: {missing}")
    if not contenders:
        raise ValueError(f"nothing to measure: {'; '.join(notes)}; name other --contenders")
    about = machine.about(device) | {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": given.model,
        "rounds": given.rounds,
    }
    results = Results(about, machine.read_rate(device), machine.matmul_rate(device), layers, notes)
    print(
        f"{about['gpu']}: reads {results.read_bytes_per_second / 1e12:.2f} TB/s, "
        f"multiplies {results.bf16_flops_per_second / 1e12:.0f} TFLOP/s in bf16"
    )
    print(*notes, sep="\n", flush=True)

    def on_case(samples: list[Sample]) -> None:
        results.write(given.out)
        print(_line(samples), flush=True)

    results.write(given.out)
    measure_layers(results, given.m, contenders, device, given.rounds, on_case)
    print(
        f"all figures: {given.out}; to see them: python -m examples.kernel_bench show {given.out}"
    )
    return int(any(s.wrong or s.refused for s in results.samples if s.contender == "ours"))


def _line(samples: Sequence[Sample]) -> str:
    """One case as a line of plain text."""
    parts = []
    for sample in samples:
        if sample.refused:
            parts.append(f"{sample.contender} refused: {sample.refused}")
        else:
            right = f"WRONG by {sample.error:.2g}" if sample.wrong else f"error {sample.error:.1e}"
            parts.append(f"{sample.contender} {sample.median_us:.2f} us ({right})")
    return f"{samples[0].layer} m={samples[0].m}: " + "; ".join(parts)


def show(given: argparse.Namespace) -> int:
    """Print the tables; draw the plot and write the markdown if requested; return 0."""
    results = Results.read(given.results)
    check_importable("rich", "the table")
    if given.plot:
        check_importable("matplotlib", "--plot")
        check_file(given.plot, "--plot")
    if given.markdown:
        check_file(given.markdown, "--markdown")
    from examples.kernel_bench import display

    display.tables(results)
    if given.markdown:
        from examples.kernel_bench.markdown import markdown

        given.markdown.write_text(markdown(results))
        display.written(given.markdown)
    if given.plot:
        from examples.kernel_bench.plot import plot

        plot(results, given.plot)
        display.written(given.plot)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    given = parser().parse_args(arguments)
    with refusals("what was measured is kept"):
        return measure(given) if given.command == "measure" else show(given)


if __name__ == "__main__":
    sys.exit(main())
