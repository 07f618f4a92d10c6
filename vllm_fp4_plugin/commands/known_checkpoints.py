"""Catalogue: NVFP4 checkpoints that people serve, and the verdict on each by device."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any, Literal

from vllm_fp4_plugin.versions import RELEASES

ARCHS = ("cpu", "sm_90", "sm_100")
FILE = "known_checkpoints.json"

Verdict = Literal["served", "delegated", "refused"]


@dataclass(frozen=True)
class Cell:
    """Verdict on a family on one architecture.

    Attributes:
        verdict: ``"delegated"`` where vLLM runs quantised layers that are not NVFP4, or experts.
        why: who runs what, or the reason why it is refused.
        by_headers: planned by the tensors' headers alone, as vLLM cannot build the model on a CPU.
    """

    verdict: Verdict
    why: str
    by_headers: bool = False


@dataclass(frozen=True)
class Row:
    """A family of checkpoints of one architecture, format and precision.

    Attributes:
        family: name of the family.
        checkpoints: names of the checkpoints that people serve.
        architecture: class of the model, as ``config.json`` names it.
        model_type: type of the model's config, likewise.
        format: exporter's format.
        ran: test that serves a tiny checkpoint of the family and compares outputs; empty: planned.
        note: part of the tiny checkpoint that stands in for unknown parts; empty: none.
        on: verdict on the oldest release of vLLM, by architecture in ``ARCHS``.
        changed: cells that differ on other releases of vLLM, by release and architecture.
    """

    family: str
    checkpoints: tuple[str, ...]
    architecture: str
    model_type: str
    format: str
    ran: str
    note: str
    on: dict[str, Cell]
    changed: dict[str, dict[str, Cell]]

    def cell(self, arch: str, release: str) -> Cell:
        """Verdict on an architecture, with a release of vLLM such as ``"0.33"``."""
        return self.changed.get(release, {}).get(arch, self.on[arch])

    def with_release(self, release: str, cells: Mapping[str, Cell]) -> "Row":
        """Row with the cells of a release, and all others as they are."""
        if release == RELEASES[0]:
            return replace(self, on=dict(cells))
        others = {name: each for name, each in self.changed.items() if name != release}
        differing = {arch: cell for arch, cell in cells.items() if cell != self.on[arch]}
        return replace(self, changed=others | ({release: differing} if differing else {}))


def read() -> list[Row]:
    """Read the catalogue that came with this release."""
    rows = json.loads((files("vllm_fp4_plugin.commands") / FILE).read_text(encoding="utf-8"))
    return [
        Row(
            row["family"],
            tuple(row["checkpoints"]),
            row["architecture"],
            row["model_type"],
            row["format"],
            row["ran"],
            row["note"],
            _cells(row["on"]),
            {release: _cells(cells) for release, cells in row["changed"].items()},
        )
        for row in rows
    ]


def _cells(stored: Mapping[str, Any]) -> dict[str, Cell]:
    return {arch: Cell(**cell) for arch, cell in stored.items()}


def dump(rows: list[Row]) -> str:
    """Write rows as the catalogue's file holds them."""
    return json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n"
