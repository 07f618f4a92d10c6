"""Plot of the layers: weight errors above, divergence of each layer alone below."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from examples.sensitivity.results import GroupResult, Results

COLOURS = {"absmax": "#7a7a7a", "four-over-six": "#2e6f95", "sweep": "#66a182"}
KL_COLOUR, IGNORED_COLOUR = "#8d99ae", "#d1495b"


def plot(results: Results, file: Path) -> None:
    """Draw a column for each kind of layer as PNG."""
    kinds: dict[str, list[GroupResult]] = {}
    for row in results.groups:
        kinds.setdefault(row.group.kind, []).append(row)
    figure, axes = plt.subplots(
        2, len(kinds), figsize=(3.4 * len(kinds) + 0.8, 6.8), squeeze=False,
        sharey="row", layout="constrained",
    )  # fmt: skip
    for above, below, (kind, rows) in zip(*axes, kinds.items(), strict=True):
        above.set_title(kind, fontsize=10)
        _weight_errors(above, rows)
        _sensitivity(below, rows)
        for axis in (above, below):
            axis.grid(axis="y", color="#eeeeee")
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
            axis.xaxis.get_major_locator().set_params(integer=True)
        below.set_xlabel("decoder layer")
    axes[0][0].set_ylim(bottom=0)
    axes[0][0].set_ylabel("weight: relative squared error, %")
    axes[1][0].set_ylim(bottom=0)
    axes[1][0].set_ylabel("quantised alone: KL, 10⁻³ nats")
    handles, labels = axes[0][0].get_legend_handles_labels()
    bars = [mpl.patches.Patch(color=c) for c in (KL_COLOUR, IGNORED_COLOUR)]
    figure.legend(
        handles + bars, [*labels, "quantised", "on the list of ignored"],
        loc="outside lower center", ncols=len(labels) + 2, frameon=False,
    )  # fmt: skip
    figure.suptitle(_title(results), fontsize=11)
    figure.savefig(file, dpi=140)
    plt.close(figure)


def _weight_errors(axis: Any, rows: list[GroupResult]) -> None:
    for rule, colour in COLOURS.items():
        axis.plot([100 * row.weight_error[rule] for row in rows], color=colour, marker="o", ms=3.5,
                  lw=1.5, label=rule)  # fmt: skip


def _sensitivity(axis: Any, rows: list[GroupResult]) -> None:
    heights = [1e3 * row.kl.estimate for row in rows]
    below = [1e3 * (row.kl.estimate - row.kl.low) for row in rows]
    above = [1e3 * (row.kl.high - row.kl.estimate) for row in rows]
    colours = [IGNORED_COLOUR if row.ignored else KL_COLOUR for row in rows]
    axis.bar(range(len(rows)), heights, 0.8, color=colours, yerr=[below, above],
             error_kw={"ecolor": "#333333", "elinewidth": 0.8, "capsize": 2})  # fmt: skip


def _title(results: Results) -> str:
    return (
        f"{results.about['model']}, scales {results.rule}: KL {results.quantised.kl.estimate:.4f} "
        f"at {results.quantised.bits_per_weight:.2f} bits per weight, "
        f"{results.with_list.kl.estimate:.4f} at {results.with_list.bits_per_weight:.2f} "
        f"with {len(results.ignored)} of {len(results.groups)} layers ignored"
    )
