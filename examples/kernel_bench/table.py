"""Rows of a layer's table, for the terminal and for markdown."""

from collections.abc import Sequence
from typing import NamedTuple

from examples.kernel_bench.layers import BenchLayer
from examples.kernel_bench.results import Results, Sample, speed_up

TITLES = {
    "ours": "ours",
    "w4a8": "ours, FP8 tokens",
    "humming": "Humming",
    "marlin": "Marlin",
    "fp8": "torch FP8",
    "bf16": "cuBLAS",
}


class LayerTable(NamedTuple):
    """Table of one layer's times.

    Attributes:
        title: the layer and its sizes.
        headings: headings of the columns.
        rows: a cell for each heading; one row for each number of tokens.
    """

    title: str
    headings: list[str]
    rows: list[list[str]]


def layer_tables(results: Results) -> list[LayerTable]:
    """A table for each layer that has samples."""
    tables = []
    for layer in results.layers:
        by_tokens = results.of_layer(layer.name)
        if by_tokens:
            tables.append(_table(results, layer, by_tokens))
    return tables


def layer_title(layer: BenchLayer) -> str:
    """The layer's name and ``N × K``."""
    if layer.gate_up:
        return f"{layer.name} and SiLU-mul, 2·{layer.n} × {layer.k}"
    return f"{layer.name}, {layer.n} × {layer.k}"


def heading(results: Results) -> list[str]:
    """Heading: model, GPU, versions, measured rates, notes."""
    about = results.about
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return [
        f"{about['model']} on {about['gpu']}, CUDA {about['cuda']}",
        f"{versions}, commit {about['commit'] or 'unknown'}",
        f"this machine reads {results.read_bytes_per_second / 1e12:.2f} TB/s and multiplies "
        f"{results.bf16_flops_per_second / 1e12:.0f} TFLOP/s with cuBLAS in bf16",
        *results.notes,
    ]


def footnote(results: Results) -> str:
    """Legend of the columns."""
    return (
        f"Median microseconds of a launch over {results.about['rounds']} alternating replays of "
        "CUDA graphs; twice L2 lies between two uses of a weight. cuBLAS's weights are bfloat16. "
        "× is how many times faster ours is. Read and bf16: what ours reaches of the machine's "
        "two measured rates. Error: of ours, largest difference from the exact result on a few "
        "rows, as a share of its largest value."
    )


def _table(
    results: Results, layer: BenchLayer, by_tokens: dict[int, dict[str, Sample]]
) -> LayerTable:
    names = results.contenders
    rivals = [name for name in names if name != "ours"] if "ours" in names else []
    headings = ["M", *(f"{TITLES[name]} µs" for name in names)]
    headings += [f"× {TITLES[name]}" for name in rivals]
    if "ours" in names:
        headings += ["read", "bf16", "error"]
    rows = []
    for m, samples in sorted(by_tokens.items()):
        ours = samples.get("ours")
        row = [f"{m}", *(_time(samples.get(name)) for name in names)]
        row += [_ratio(speed_up(ours, samples.get(name))) for name in rivals]
        if "ours" in names:
            row += _shares(results, ours)
        rows.append(row)
    return LayerTable(layer_title(layer), headings, rows)


def _time(sample: Sample | None) -> str:
    if sample is None:
        return ""
    if sample.refused:
        return "none"
    figures = f"{sample.median_us:.1f}" if sample.median_us < 1000 else f"{sample.median_us:,.0f}"
    return f"{figures} WRONG" if sample.wrong else figures


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _shares(results: Results, ours: Sample | None) -> list[str]:
    if ours is None or ours.refused:
        return ["", "", ""]
    read, computed = results.read_share(ours), results.flops_share(ours)
    return [f"{read:.0%}", f"{computed:.0%}", f"{ours.error:.1e}"]


def refusals(results: Results) -> Sequence[str]:
    """Distinct reasons for missing times, with contender, layer and M of the first occurrence."""
    found: dict[tuple[str, str], str] = {}
    for s in results.samples:
        if s.refused:
            place = f"{TITLES[s.contender]}, {s.layer} at M = {s.m}: {s.refused}"
            found.setdefault((s.contender, s.refused), place)
    return list(found.values())
