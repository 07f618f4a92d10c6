"""``python -m vllm_fp4_plugin catalogue``: verdicts on the checkpoints that people serve."""

from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from nvfp4_kernels.tool.options import JsonOption
from vllm_fp4_plugin.commands import command_line, known_checkpoints
from vllm_fp4_plugin.commands.known_checkpoints import Cell, Row
from vllm_fp4_plugin.versions import RELEASES, vllm_release

_LEGEND = (
    "assumed: part of the tiny checkpoint that stands in for what is not known of the real ones",
    "cpu: one with AVX-512, which vLLM's attention needs for an FP8 KV cache since vLLM 0.33",
    "delegated: vLLM runs the quantised layers that are named, the rest is ours",
    "*: planned by the tensors' headers alone, as vLLM does not build the model on a CPU, or not "
    "from the config that the tiny checkpoint has",
    "run: a tiny checkpoint of the family is served on a CPU by the tests, and what comes out "
    "compared; all others are planned: their layers are built, and none of them runs",
)


def catalogue(
    find: Annotated[
        str, typer.Argument(help="Part of a family's or a checkpoint's name; all without it.")
    ] = "",
    vllm: Annotated[
        str, typer.Option("--vllm", help="Release of vLLM; that of the installed one without it.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Print the verdict on known NVFP4 checkpoints on a CPU, sm_90 and sm_100, with the reason.

    Fields of --json: vllm, the release; families, a list of objects with family, architecture,
    assumed, checkpoints, on and run, where on has a verdict (served, delegated or refused), why and
    by_headers for each of cpu, sm_90 and sm_100; checkpoints, their number by device and verdict.
    """
    rows = [row for row in known_checkpoints.read() if _matches(row, find)]
    with command_line.refusals(find):
        release = _release(vllm)
        if not rows:
            raise ValueError(
                f"find: no family or checkpoint has {find!r} in its name; leave it out for all"
            )
    counts = {arch: _counts(rows, arch, release) for arch in known_checkpoints.ARCHS}
    if as_json:
        families = [_family(row, release) for row in rows]
        command_line.print_json({"vllm": release, "families": families, "checkpoints": counts})
        return
    console = command_line.output()
    console.print(_table(rows, release))
    for arch, count in counts.items():
        each = ", ".join(f"{n} {verdict}" for verdict, n in count.items())
        console.print(f"{arch}: of {count.total()} checkpoints {each}")
    for line in _LEGEND:
        console.print(line, markup=False)


def _counts(rows: list[Row], arch: str, release: str) -> Counter[str]:
    """Number of checkpoints by verdict on device ``arch``."""
    counts = Counter[str]()
    for row in rows:
        counts[row.cell(arch, release).verdict] += len(row.checkpoints)
    return counts


def _family(row: Row, release: str) -> dict[str, Any]:
    """Family and its verdicts, as a JSON object."""
    return {
        "family": row.family,
        "architecture": row.architecture,
        "assumed": row.note,
        "checkpoints": row.checkpoints,
        "on": {arch: asdict(row.cell(arch, release)) for arch in known_checkpoints.ARCHS},
        "run": bool(row.ran),
    }


def _release(requested: str) -> str:
    release = requested or vllm_release()
    if release not in RELEASES:
        known = " or ".join(RELEASES)
        raise ValueError(f"vllm: is {release!r}, must be {known}; give --vllm {RELEASES[-1]}")
    return release


def _matches(row: Row, find: str) -> bool:
    return any(find.lower() in name.lower() for name in (row.family, *row.checkpoints))


def _table(rows: list[Row], release: str) -> Table:
    drawn = Table(title=f"NVFP4 checkpoints, vLLM {release}", title_justify="left", show_lines=True)
    for column in ("family", "checkpoints", *known_checkpoints.ARCHS, "run"):
        drawn.add_column(column)
    for row in rows:
        names = "\n".join(row.checkpoints)
        cells = [_text(row.cell(arch, release)) for arch in known_checkpoints.ARCHS]
        family = "\n".join(filter(None, (row.family, row.architecture, _assumed(row))))
        drawn.add_row(*map(escape, (family, names, *cells, "yes" if row.ran else "")))
    return drawn


def _assumed(row: Row) -> str:
    return f"assumed: {row.note}" if row.note else ""


def _text(cell: Cell) -> str:
    return f"{cell.verdict}{'*' if cell.by_headers else ''}" + (f": {cell.why}" if cell.why else "")
