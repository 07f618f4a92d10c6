"""What every Python with this folder on its path begins with.

``DENIED_CPU_CAPABILITIES`` holds prefixes of names of the CPU's capabilities that torch is to do
without, ``COLLECTION_THRESHOLDS`` those of the garbage collector; both are separated by commas.
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
    """Make every predicate of ``torch.cpu`` answer as on a CPU without what is denied."""
    found = cpu.get_capabilities()
    left = {name: not name.startswith(DENIED) and value for name, value in found.items()}
    cpu.get_capabilities = lambda: MappingProxyType(left)


class Denying(MetaPathFinder):
    """The finder of ``torch.cpu``; importing torch here would slow down every other Python."""

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
