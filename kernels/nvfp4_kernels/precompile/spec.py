"""A kernel, named."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from nvfp4_kernels.runtime.compile import DeviceKernel


@dataclass(frozen=True)
class KernelSpec:
    """A kernel in one configuration, named rather than made: making it takes CuTe.

    Attributes:
        op: what it belongs to, for tables.
        target: ``"module:class"``.
        fields: of that dataclass; parts that take CuTe to be made are such specs themselves.
    """

    op: str
    target: str
    fields: tuple[Any, ...]

    def kernel(self) -> DeviceKernel:
        module, _, kind = self.target.partition(":")
        parts = (f.kernel() if isinstance(f, KernelSpec) else f for f in self.fields)
        return getattr(import_module(module), kind)(*parts)
