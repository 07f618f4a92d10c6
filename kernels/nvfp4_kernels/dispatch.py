"""Dispatch of an op to a kernel: one table per op, keyed by architecture family and arithmetic."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.devices import device_arch, device_family
from nvfp4_kernels.runtime.launch_cache import Prepared
from nvfp4_kernels.runtime.recording import is_listened_to

# Arithmetic of an op: NVFP4, 16-bit or FP8 activations against NVFP4 weights; of attention:
# floating point throughout, or keys and values in FP8; of the indexer: the format of its vectors.
Mode = Literal["w4a4", "w4a16", "w4a8", "float", "fp8_kv", "nvfp4", "mxfp4", "fp8", "bf16"]
# Layout of a product's weight, described in ``nvfp4``, ``fragments`` or ``folded``.
WeightLayout = Literal["blocked", "fragments", "folded"]


class NoKernelError(NotImplementedError):
    """No kernel of an op exists for the device and mode."""


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op, for one family of architectures and one mode.

    Attributes:
        op: name of the op, e.g. ``"gemm"``.
        arch: ``"cpu"``, or a family of CUDA architectures, named after the family's first member,
            e.g. ``"sm_100"``.
        mode: arithmetic of the kernel.
        variant: ``"reference"``, or a name for the kernel, e.g. ``"wgmma"``.
        target: ``"module:function"``, imported by ``load``.
        weight_layout: preferred weight layout of a GEMM kernel.
        batch_invariant: whether each row of the result depends, to the bit, on its input row
            alone, not on the number of rows.
    """

    op: str
    arch: str
    mode: Mode
    variant: str
    target: str
    weight_layout: WeightLayout = "blocked"
    batch_invariant: bool = False

    @property
    def label(self) -> str:
        """Name in reports, e.g. ``nvfp4_gemm/reference (cpu)``."""
        special = "" if self.mode in ("w4a4", "float") else f"_{self.mode}"
        invariant = ", batch-invariant" if self.batch_invariant else ""
        return f"nvfp4_{self.op}{special}/{self.variant} ({self.arch}{invariant})"

    def takes(self, layout: WeightLayout) -> bool:
        """Whether the kernel reads a weight in ``layout``: references read every layout."""
        return self.arch == "cpu" or layout == self.weight_layout

    def load(self) -> Callable[..., Any]:
        """Import the kernel's function."""
        return load_target(self.target)


def load_target(target: str) -> Callable[..., Any]:
    """Import the function or class that a target names, ``"module:name"``."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


# Variant and target, and the weight's layout unless blocked.
Entry = tuple[str, str] | tuple[str, str, WeightLayout]
# Entries of kernels by architecture family, followed by the kernel's modes.
Entries = dict[tuple[str, *tuple[Mode, ...]], Entry]

Names = tuple[tuple[str, str], ...]  # of pairs of arguments

# Python types for a torch op's argument types; torch accepts no bool as a number here.
_TYPES: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor,),
    "int": (int, Integral),
    "float": (float, int, Real),
    "bool": (bool,),
}


def called(
    op: CustomOpDef, x: Tensor, compared: Names = (), **multiples: int
) -> Callable[..., Any]:
    """Callable for an op: bypasses torch's dispatcher unless ops are traced or intercepted.

    For an op that mutates some of 27 arguments the dispatcher takes 0.3 ms, as it copies the
    argument list for each mutated argument. The function behind the op, called directly, also
    refuses arguments of wrong types, and skips the checks of calls that resemble an earlier call:
    see ``nvfp4_kernels.runtime.launch_cache``.

    Args:
        op: a custom op.
        x: one of the tensors that the op is called with.
        compared: pairs of names of tensor arguments, see ``Prepared``.
        multiples: granularity of integer arguments, by name, see ``Prepared``.

    Returns:
        The op if torch.compile or a dispatch mode is active, or if ``x`` is of a subclass of
        ``Tensor``; else the function behind the op.
    """
    if is_listened_to() or type(x) is not Tensor:
        return op
    return _direct(op, compared, **multiples)


@functools.cache
def _direct(op: CustomOpDef, compared: Names, **multiples: int) -> Callable[..., Any]:
    """Function behind ``op``, with checks of argument types and with prepared launches."""
    arguments = op._opoverload._schema.arguments
    kinds = [str(a.type).removeprefix("Optional[").rstrip("]") for a in arguments]
    optional = [str(a.type).startswith("Optional[") for a in arguments]
    expected = [
        (a.name, _TYPES[kind], may_be_none, kind in ("int", "float"))
        for a, kind, may_be_none in zip(arguments, kinds, optional, strict=True)
    ]
    function = op._init_fn

    def direct(*given: Any) -> Any:
        for (name, types, may_be_none, number), x in zip(expected, given, strict=True):
            fits = may_be_none if x is None else isinstance(x, types)
            if not fits or (number and x.__class__ is bool):
                kind = types[0].__name__ + (" or None" if may_be_none else "")
                raise InvalidArgument(f"{name}: is {type(x).__name__}, must be {kind}; convert it")
        return function(*given)

    places = {name: place for place, (name, *_) in enumerate(expected)}
    return Prepared(
        direct,
        {places[name]: multiple for name, multiple in multiples.items()},
        [(places[one], places[other]) for one, other in compared],
    )


class KernelTable:
    """Kernels of one op, keyed by architecture family and mode.

    Args:
        op: name of the op.
        kernels: default kernels, which are the fastest.
        batch_invariant: kernels whose result rows are bitwise independent of each other.
    """

    def __init__(
        self,
        op: str,
        kernels: Entries,
        batch_invariant: Entries | None = None,
    ) -> None:
        self.op = op
        self._kernels = {
            (arch, mode): Kernel(op, arch, mode, *entry)
            for (arch, *modes), entry in kernels.items()
            for mode in modes
        }
        self._batch_invariant = {
            (arch, mode): replace(Kernel(op, arch, mode, *entry), batch_invariant=True)
            for (arch, *modes), entry in (batch_invariant or {}).items()
            for mode in modes
        }

    def modes(self, arch: str) -> list[Mode]:
        """Modes for which a family of architectures, or ``"cpu"``, has a kernel."""
        return [mode for family, mode in self._kernels if family == arch]

    def find(
        self, device: torch.device, mode: Mode, batch_invariant: bool = False
    ) -> Kernel | None:
        """Default or batch-invariant kernel for ``device`` and ``mode``; None if there is none."""
        kernels = self._batch_invariant if batch_invariant else self._kernels
        return kernels.get((device_family(device), mode))

    def select(self, device: torch.device, mode: Mode, batch_invariant: bool = False) -> Kernel:
        """Default or batch-invariant kernel for ``device`` and ``mode``.

        Raises:
            NoKernelError: there is no such kernel; the message lists the existing kernels.
        """
        kernel = self.find(device, mode, batch_invariant)
        if kernel is None:
            where = f"{device.type} ({device_arch(device)})"
            kernels = self._batch_invariant if batch_invariant else self._kernels
            there_is = ", ".join(k.label for k in kernels.values()) or "nothing"
            kind = "batch-invariant " if batch_invariant else ""
            raise NoKernelError(
                f"{self.op}: no {kind}{mode} kernel for {where}; there is {there_is}; "
                "run on one of those devices"
            )
        return kernel
