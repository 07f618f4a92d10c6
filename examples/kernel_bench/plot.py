"""Plot of the results: the times of each layer, and our speed-ups."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

from examples.kernel_bench.layers import NVFP4_BYTES, BenchLayer
from examples.kernel_bench.results import Results, Sample, speed_up
from examples.kernel_bench.table import TITLES, layer_title

COLOURS = {
    "ours": "#d1495b",
    "w4a8": "#8f2d56",
    "humming": "#edae49",
    "marlin": "#2e6f95",
    "fp8": "#3c8d5a",
    "bf16": "#7a7a7a",
}
MARKERS = {"ours": "o", "w4a8": "*", "humming": "D", "marlin": "s", "fp8": "v", "bf16": "^"}


def plot(results: Results, file: Path) -> None:
    """Draw a column for each layer as PNG: times above, speed-ups below."""
    layers = [layer for layer in results.layers if results.of_layer(layer.name)]
    if not layers:
        raise ValueError("results: hold no samples, there is nothing to draw; measure again")
    figure, axes = plt.subplots(
        2, len(layers), figsize=(3.9 * len(layers) + 0.6, 7.6), squeeze=False,
        sharex=True, sharey="row", height_ratios=(3, 2), layout="constrained",
    )  # fmt: skip
    for above, below, layer in zip(*axes, layers, strict=True):
        samples = results.of_layer(layer.name)
        _times(above, results, layer, samples)
        _speed_ups(below, results, samples)
        ticks = [m for i, m in enumerate(sorted(samples)) if len(samples) < 9 or i % 2 == 0]
        below.set_xticks(ticks, [f"{m}" for m in ticks])
        below.set_xlabel("tokens (M)")
    axes[0][0].set_ylabel("µs")
    axes[1][0].set_ylabel("how many times faster ours is")
    axes[0][0].set_ylim(*_time_limits(results))
    axes[1][0].set_ylim(0, 1.12 * max([1.0, *_ratios(results)]))
    # The upper picture's curves and bounds; the lower one has the same colours.
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"{results.about['model']} on {results.about['gpu']}")
    figure.savefig(file, dpi=140)
    plt.close(figure)


def _times(
    axis: Any, results: Results, layer: BenchLayer, samples: dict[int, dict[str, Sample]]
) -> None:
    tokens = sorted(samples)
    read = [layer.nbytes(m, NVFP4_BYTES) / results.read_bytes_per_second for m in tokens]
    computed = [layer.flops(m) / results.bf16_flops_per_second for m in tokens]
    axis.plot(tokens, [1e6 * s for s in read], color="#bbbbbb", ls="--", lw=1,
              label="reading NVFP4 once", zorder=1)  # fmt: skip
    axis.plot(tokens, [1e6 * s for s in computed], color="#bbbbbb", ls=":", lw=1.4,
              label="cuBLAS's best rate", zorder=1)  # fmt: skip
    for name in results.contenders:
        seen = [(m, s) for m in tokens if (s := samples[m].get(name)) and not s.refused]
        x, medians = [m for m, _ in seen], [s.median_us for _, s in seen]
        axis.plot(x, medians, color=COLOURS[name], marker=MARKERS[name], ms=4, lw=1.6,
                  label=TITLES[name], zorder=3 if name == "ours" else 2)  # fmt: skip
        axis.fill_between(x, [s.least_us for _, s in seen], [s.most_us for _, s in seen],
                          color=COLOURS[name], alpha=0.15, lw=0)  # fmt: skip
    axis.set(xscale="log", yscale="log", title=layer_title(layer))
    axis.title.set_fontsize(10)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.grid(which="major", color="#eeeeee")
    axis.spines[["top", "right"]].set_visible(False)


def _time_limits(results: Results) -> tuple[float, float]:
    """Limits of the time axis, in µs, around all samples; lines of bounds may leave the plot."""
    taken = [t for s in results.samples if not s.refused for t in (s.least_us, s.most_us)]
    return (min(taken) / 1.5, 1.5 * max(taken)) if taken else (1.0, 10.0)


def _ratios(results: Results) -> list[float]:
    rows = [row for layer in results.layers for row in results.of_layer(layer.name).values()]
    ratios = [speed_up(row.get("ours"), rival) for row in rows for rival in row.values()]
    return [ratio for ratio in ratios if ratio is not None]


def _speed_ups(axis: Any, results: Results, samples: dict[int, dict[str, Sample]]) -> None:
    for name in results.contenders:
        ratios = [(m, speed_up(samples[m].get("ours"), samples[m].get(name))) for m in samples]
        seen = sorted((m, ratio) for m, ratio in ratios if ratio is not None)
        if name == "ours" or not seen:
            continue
        axis.plot(*zip(*seen, strict=True), color=COLOURS[name], marker=MARKERS[name], ms=4, lw=1.6)
        for m, ratio in (seen[0], seen[-1]):
            away_from_1 = (0, 6 if ratio > 1 else -13)
            axis.annotate(f"{ratio:.2f}", (m, ratio), away_from_1, textcoords="offset points",
                          ha="center", fontsize=8, color=COLOURS[name])  # fmt: skip
    axis.axhline(1, color="#444444", lw=0.8)
    axis.minorticks_off()
    axis.grid(which="major", color="#eeeeee")
    axis.spines[["top", "right"]].set_visible(False)
