"""Stand-in that runs the ops of sm_90 on a CPU: a formula replaces the GEMM kernel.

References replace the small kernels.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.formats.fragments import blocked_weight
from nvfp4_kernels.formats.nvfp4 import block_scaled_product
from nvfp4_kernels.gemm import reference
from nvfp4_kernels.gemm.arguments import check_layouts
from nvfp4_kernels.gemm.call import GemmCall, ProductCall
from nvfp4_kernels.gemm.silu_mul import reference as silu_mul_reference

_LAUNCH = "nvfp4_kernels.gemm.sm90.launch"
_SMALL = ("norm", "rotary", "quantize", "quantize.rms_norm")


@dataclass
class Sm90Product:
    """Stand-in for ``nvfp4_kernels.gemm.sm90.launch``, which needs CuTe.

    Attributes:
        rows: number of activation rows in each call so far.
        formats: dtype of the activations, and of the result, in each call so far.
    """

    rows: list[int] = field(default_factory=list)
    formats: list[tuple[torch.dtype, torch.dtype]] = field(default_factory=list)

    def gemm(self, call: ProductCall) -> tuple[Tensor, None]:
        """Compute ``gemm``, or ``silu_mul_gemm`` for two weights, fragments or folded."""
        a = call.a.flatten(0, -2)
        assert a.ndim == 2
        check_layouts(call, a=a)  # as the kernel's launch does
        self.rows.append(a.shape[0])
        out, _ = self._fp8(call) if a.dtype == torch.float8_e4m3fn else self._weight_only(call, a)
        self.formats.append((a.dtype, out.dtype))
        return out, None

    def _fp8(self, call: ProductCall) -> tuple[Tensor, Tensor | None]:
        if isinstance(call, GemmCall):
            return reference.gemm(call)
        return silu_mul_reference.silu_mul_gemm(call)

    def _weight_only(self, call: ProductCall, a: Tensor) -> tuple[Tensor, None]:
        assert call.output is None
        products = [
            block_scaled_product(a, None, *blocked_weight(*weight, call.rows, a.shape[1]))
            for weight in call.weights
        ]
        if len(products) == 2:
            gate, up = (p.mul_(factor) for p, factor in zip(products, call.alpha, strict=True))
            out = torch.nn.functional.silu(gate).mul_(up)
        else:
            sizes = torch.tensor(list(call.shard_sizes))
            out = products[0].mul_(call.alpha.repeat_interleave(sizes))
        out = out if call.bias is None else out.add_(call.bias.float())
        return out.to(call.out_dtype).view(*call.a.shape[:-1], call.rows), None


@contextmanager
def sm90_ops() -> Iterator[Sm90Product]:
    """Context in which ops on CPU tensors run the code path of sm_90."""
    product = Sm90Product()
    module = ModuleType(_LAUNCH)
    vars(module).update(gemm=product.gemm, silu_mul_gemm=product.gemm)
    stands = {_LAUNCH: module} | {
        f"nvfp4_kernels.{room}.sm90": import_module(f"nvfp4_kernels.{room}.reference")
        for room in _SMALL
    }
    before = {name: sys.modules.get(name) for name in stands}
    sys.modules.update(stands)
    try:
        with standing_in("cpu", "sm_90"):
            yield product
    finally:
        _put(before)


def _put(modules: Mapping[str, ModuleType | None]) -> None:
    """Restore modules in ``sys.modules`` and in their packages; None: remove the module."""
    for name, module in modules.items():
        package, _, attribute = name.rpartition(".")
        parent = vars(sys.modules.get(package, ModuleType(package)))
        if module is None:
            sys.modules.pop(name, None)
            parent.pop(attribute, None)
        else:
            sys.modules[name] = parent[attribute] = module
