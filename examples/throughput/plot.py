"""Plot of the comparison: the variants' rates relative to the baseline, by case."""

import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from examples.throughput.cases import Case
from examples.throughput.results import Results, VariantResult

COLOURS = {
    "bf16": "#8d99ae",
    "nvfp4-tc": "#d1495b",
    "modelopt": "#2e6f95",
    "compressed-tensors": "#66a182",
}
BAR_INCHES = 0.46


def plot(results: Results, file: Path) -> None:
    """Draw grouped bars as PNG; tokens per second and the ratio are written on each bar.

    If the baseline lacks a rate in any case, all bars are relative to the fastest variant of the
    case instead.

    Raises:
        ValueError: nothing was measured.
    """
    cases = [case for case in results.cases if any(v.rates(case) for v in results.variants)]
    if not cases:
        raise ValueError("results: hold no rates, there is nothing to draw; measure again")
    width = max(6.0, 1.2 + len(cases) * (len(results.variants) + 0.8) * BAR_INCHES)
    figure, axis = plt.subplots(figsize=(width, 4.6), layout="constrained")
    whole = all(results.variant(results.baseline).rates(case) for case in cases)
    for index, variant in enumerate(results.variants):
        _bars(axis, results, variant, index, cases, whole)
    if whole:
        axis.axhline(1, color="#444444", lw=0.8, zorder=3)
    axis.set_ylabel(f"times the rate of {results.baseline if whole else 'the fastest'}")
    axis.set_xticks(range(len(cases)), [case.title.replace(" ", "\n", 1) for case in cases])
    axis.set_ylim(top=1.12 * axis.get_ylim()[1])  # room for the text above the tallest bar
    axis.grid(axis="y", color="#eeeeee")
    axis.set_axisbelow(True)
    axis.tick_params(axis="x", length=0)
    axis.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=COLOURS[v.name], label=v.name) for v in results.variants]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    devices = ", ".join(dict.fromkeys(v.device for v in results.variants if v.device))
    figure.suptitle(f"{results.about['model']} on {devices or 'an unknown device'}, tokens/s")
    if warning := results.warning():
        axis.set_title(warning, fontsize=9, color="#d1495b")
    figure.savefig(file, dpi=140)
    plt.close(figure)


def _bars(
    axis: Any,
    results: Results,
    variant: VariantResult,
    index: int,
    cases: list[Case],
    whole: bool,
) -> None:
    count = len(results.variants)
    step = 1 / (count + 0.8)
    colour = COLOURS[variant.name]
    for place, case in enumerate(cases):
        x = place + (index - (count - 1) / 2) * step
        rate = results.rate(variant, case)
        if rate is None:
            text = "failed" if variant.errors else "none"
            _label(axis, x, 0, text, rotation=90, color=colour)
            continue
        height = rate.median / _reference(results, case, whole)
        axis.bar(x, height, 0.92 * step, color=colour, yerr=height * rate.spread,
                 error_kw={"ecolor": "#333333", "elinewidth": 0.8, "capsize": 2})  # fmt: skip
        of_baseline = variant.name == results.baseline or rate.ratio is None
        ratio = "" if of_baseline else f"\n×{rate.ratio:.2f}"
        _label(axis, x, height * (1 + rate.spread), f"{rate.median:,.0f}{ratio}")


def _reference(results: Results, case: Case, whole: bool) -> float:
    if whole:
        return statistics.median(results.variant(results.baseline).rates(case))
    return max(statistics.median(v.rates(case)) for v in results.variants if v.rates(case))


def _label(axis: Any, x: float, y: float, text: str, **style: Any) -> None:
    axis.annotate(
        text, (x, y), (0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=7.5,
        **style,
    )  # fmt: skip
