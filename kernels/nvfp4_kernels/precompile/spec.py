"""Kernel names and configurations, as values that do not need CuTe."""

from dataclasses import dataclass
from typing import Any

from nvfp4_kernels.dispatch import load_target
from nvfp4_kernels.runtime.compile import DeviceKernel


@dataclass(frozen=True)
class KernelSpec:
    """Name of a kernel and its configuration; CuTe is needed only to build the kernel.

    Attributes:
        op: name of the op, for tables.
        target: class of the kernel as ``"module:class"``.
        fields: fields of the target's dataclass; a field whose class imports CuTe is a nested spec.
    """

    op: str
    target: str
    fields: tuple[Any, ...]

    def kernel(self) -> DeviceKernel:
        parts = (f.kernel() if isinstance(f, KernelSpec) else f for f in self.fields)
        return load_target(self.target)(*parts)
