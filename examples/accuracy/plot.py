"""Plot of the comparison: a panel for each measure or task, with a row for each variant."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from examples.accuracy.results import Results, VariantResult, task_interval
from examples.accuracy.variants import REFERENCE, YARDSTICKS
from examples.perplexity import Interval

COLUMNS = 3
RIGHT, WRONG, BESIDE = "#2e6f95", "#d1495b", "#8d99ae"


def plot(results: Results, file: Path) -> None:
    """Draw estimates and 95% intervals into the PNG ``file``.

    Raises:
        ValueError: only the reference was measured.
    """
    compared = [v for v in results.variants if v.windows and v.name != REFERENCE]
    if not compared:
        raise ValueError("results: hold no comparison, there is nothing to draw; measure again")
    panels: list[tuple[str, Callable[[VariantResult], Interval | None]]] = [
        ("Δ log perplexity", results.difference),
        ("KL divergence, nats per token", lambda v: v.kl),
        ("same likeliest token", lambda v: v.agreement),
    ]
    panels += [(f"{t}, {m}", _of_task(t, m)) for t, m in results.tasks]
    variants = [v for v in results.variants if v.windows]
    rows = -(-len(panels) // COLUMNS)
    figure, axes = plt.subplots(
        rows,
        COLUMNS,
        figsize=(12, 0.6 + rows * (0.9 + 0.28 * len(variants))),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (title, interval) in zip(axes.flat, panels, strict=False):
        _panel(axis, title, variants, interval)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    axes[0, 0].set_yticks(range(len(variants)), [v.name for v in variants])
    axes[0, 0].invert_yaxis()
    about = results.about
    model = "/".join(Path(about["model"]).parts[-2:])
    figure.suptitle(f"{model} on {about['device']}: 95% intervals", fontsize=10)
    figure.savefig(file, dpi=140)
    plt.close(figure)


def _of_task(task: str, metric: str) -> Callable[[VariantResult], Interval | None]:
    def interval(variant: VariantResult) -> Interval | None:
        scores = (s for s in variant.tasks if (s.task, s.metric) == (task, metric))
        return next(map(task_interval, scores), None)

    return interval


def _panel(
    axis: Any,
    title: str,
    variants: list[VariantResult],
    interval: Callable[[VariantResult], Interval | None],
) -> None:
    for place, variant in enumerate(variants):
        found = interval(variant)
        if found is None:
            continue
        beside = variant.name in (REFERENCE, *YARDSTICKS)
        colour = WRONG if variant.flags else BESIDE if beside else RIGHT
        ends = [[max(0.0, found.estimate - found.low)], [max(0.0, found.high - found.estimate)]]
        axis.errorbar(found.estimate, place, xerr=ends, fmt="o", ms=4, capsize=3, color=colour)
        if variant.name == REFERENCE:
            axis.axvline(found.estimate, color="#444444", lw=0.8, zorder=0)
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.locator_params(axis="x", nbins=5)
    axis.grid(axis="x", color="#eeeeee")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
