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
    """Verdict on a checkpoint family on one device.

    Attributes:
        verdict: ``"served"``: our kernels run all quantised layers; ``"delegated"``: vLLM's own
            kernels run the experts, or quantised layers that are not NVFP4.
        why: whose kernels run which layers, or the reason why the family is refused.
        by_headers: whether the verdict comes from the tensors' headers alone, as vLLM cannot build
            the model on a CPU, or cannot build it from the tiny checkpoint's config.
    """

    verdict: Verdict
    why: str
    by_headers: bool = False


@dataclass(frozen=True)
class Row:
    """Family of checkpoints of one architecture, format and precision.

    The verdicts are for a tiny checkpoint, which stands in for the family's checkpoints.

    Attributes:
        family: name of the family.
        checkpoints: names of the checkpoints that people serve.
        architecture: class of the model, from ``config.json``.
        model_type: type of the model's config, from ``config.json``.
        format: exporter's format.
        ran: test that serves the tiny checkpoint and compares outputs; empty: only planned.
        note: assumption of the tiny checkpoint about the family's checkpoints, where these are not
            known; may be empty.
        on: verdicts with the oldest supported vLLM release, by device in ``ARCHS``.
        changed: verdicts with other vLLM releases, by release and device, where they differ.
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
        """Verdict on device ``arch`` with a vLLM release such as ``"0.33"``."""
        return self.changed.get(release, {}).get(arch, self.on[arch])

    def with_release(self, release: str, cells: Mapping[str, Cell]) -> "Row":
        """Copy of the row with the verdicts of one vLLM release replaced, and all others kept."""
        oldest, *later = RELEASES
        verdicts = {
            name: {arch: self.cell(arch, name) for arch in self.on}
            for name in (oldest, *later, *self.changed)
        } | {release: dict(cells)}
        on = verdicts.pop(oldest)
        changed = {
            name: {arch: cell for arch, cell in each.items() if cell != on[arch]}
            for name, each in verdicts.items()
        }
        return replace(self, on=on, changed={name: each for name, each in changed.items() if each})


def read() -> list[Row]:
    """Read the catalogue that this release of the plugin contains."""
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
    """Format rows as the text of the catalogue's file."""
    return json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n"
