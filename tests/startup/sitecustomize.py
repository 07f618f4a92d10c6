"""Startup code of every Python process with this folder on its path.

``DENIED_CPU_CAPABILITIES`` lists prefixes of the CPU capabilities that torch must report as
missing, ``COLLECTION_THRESHOLDS`` the thresholds of the garbage collector; both are separated by
commas.
"""

import gc
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import MappingProxyType, ModuleType

DENIED = tuple(filter(None, os.environ.get("DENIED_CPU_CAPABILITIES", "").split(",")))
THRESHOLDS = tuple(map(int, filter(None, os.environ.get("COLLECTION_THRESHOLDS", "").split(","))))


def deny(cpu: ModuleType) -> None:
    """Make every predicate of ``torch.cpu`` answer as on a CPU without the denied capabilities."""
    found = cpu.get_capabilities()
    left = {name: not name.startswith(DENIED) and value for name, value in found.items()}
    cpu.get_capabilities = lambda: MappingProxyType(left)


class Denying(MetaPathFinder):
    """Import finder for ``torch.cpu``; importing torch here would slow down every other process."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch.cpu":
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_deny(module: ModuleType) -> None:
            execute(module)
            deny(module)

        spec.loader.exec_module = execute_and_deny  # type: ignore[method-assign]
        return spec


if DENIED:
    sys.meta_path.insert(0, Denying())
if THRESHOLDS:
    gc.set_threshold(*THRESHOLDS)
