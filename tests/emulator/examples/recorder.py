"""A device that records each launch request and runs nothing."""

import json
from collections.abc import Mapping
from pathlib import Path

from tests.emulator.machine.limits import B200, Limits
from tests.emulator.ptx.parser import parse
from tests.emulator.ptx.syntax import Module
from tests.emulator.runtime.device import Dimensions


class Recorder:
    """Device that writes each module to ``<name>.<n>.ptx`` and its launches to ``<name>.<n>.json``.

    Args:
        folder: output folder; None keeps the launches in memory only.
        name: prefix of the files.
    """

    def __init__(self, folder: Path | None = None, name: str = "kernel") -> None:
        self.limits: Limits = B200
        self.launches: list[dict[str, object]] = []
        self._folder = folder
        self._name = name
        self._modules: dict[str, Module] = {}

    def load(self, ptx: str) -> Module:
        if ptx not in self._modules:
            if self._folder:
                stem = f"{self._name}.{len(self._modules)}"
                self._folder.joinpath(f"{stem}.ptx").write_text(ptx)
            self._modules[ptx] = parse(ptx)
        return self._modules[ptx]

    def launch(
        self,
        module: Module,
        kernel: str,
        grid: Dimensions,
        block: Dimensions,
        cluster: Dimensions = (1, 1, 1),
        dynamic_shared: int = 0,
        parameters: list[bytes] | None = None,
        attributes: Mapping[str, int] | None = None,
        *,
        stream: int = 0,
    ) -> None:
        number = list(self._modules.values()).index(module)
        self.launches.append(
            {
                "module": number,
                "kernel": kernel,
                "grid": grid,
                "block": block,
                "cluster": cluster,
                "dynamic_shared": dynamic_shared,
                "parameter_bytes": [len(p) for p in parameters or []],
                "attributes": dict(attributes or {}),
                "stream": stream,
            }
        )
        if self._folder:
            own = [entry for entry in self.launches if entry["module"] == number]
            path = self._folder.joinpath(f"{self._name}.{number}.json")
            path.write_text(json.dumps(own, indent=1))

    def synchronise(self, stream: int | None = None) -> None:
        """Return immediately: launches are only recorded, so that no launch is in flight."""
