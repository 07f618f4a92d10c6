"""Markdown summary of the catalogue on the newest vLLM, as the README shows it."""

from collections import Counter
from collections.abc import Callable

from vllm_fp4_plugin.commands import known_checkpoints
from vllm_fp4_plugin.commands.known_checkpoints import Row
from vllm_fp4_plugin.versions import RELEASES

_GROUPS: dict[str, Callable[[Row], bool]] = {
    "mixtures of experts": lambda row: (
        "experts" in " ".join([row.family, *(cell.why for cell in row.on.values())])
    ),
    "dense, mixed precision": lambda row: "mixed" in row.family,
    "dense": lambda _: True,
}


def lines(rows: list[Row]) -> list[str]:
    """Lines of the table, one per group: counts of checkpoints by verdict, per architecture."""
    groups: dict[str, list[Row]] = {name: [] for name in reversed(_GROUPS)}
    for row in rows:
        groups[next(g for g, holds in _GROUPS.items() if holds(row))].append(row)
    return [_line(name, members) for name, members in groups.items()]


def _line(group: str, rows: list[Row]) -> str:
    cells = []
    for arch in known_checkpoints.ARCHS:
        counts = Counter[str]()
        for row in rows:
            counts[row.cell(arch, RELEASES[-1]).verdict] += len(row.checkpoints)
        order = ("served", "delegated", "refused")
        cells.append(", ".join(f"{counts[v]} {v}" for v in order if counts[v]))
    return f"| {group} | {' | '.join(cells)} |"
