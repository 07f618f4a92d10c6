"""Stand-in that runs the ops of sm_90 on a CPU: a formula replaces the GEMM kernel.

References replace the small kernels.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from nvfp4_kernels.checks import check_layout
from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.formats.fragments import Fragments, blocked_weight
from nvfp4_kernels.formats.nvfp4 import block_scaled_product

_LAUNCH = "nvfp4_kernels.gemm.sm90.launch"
_SMALL = ("norm", "rotary")


@dataclass
class Sm90Product:
    """Stand-in for ``nvfp4_kernels.gemm.sm90.launch``, which needs CuTe.

    Attributes:
        rows: number of activation rows in each call so far.
    """

    rows: list[int] = field(default_factory=list)

    def gemm(
        self,
        a: Tensor,
        a_scales: None,
        b: Tensor,
        b_scales: Tensor,
        alpha: Tensor,
        shard_sizes: Sequence[int],
        row_scale: None,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Compute ``nvfp4_kernels.gemm.op.gemm`` with the weight in the fragment layout."""
        n = sum(shard_sizes)
        weights = [Fragments(b, b_scales)]
        out = self.product(a.flatten(0, -2), weights, alpha, shard_sizes, n, bias, out_dtype)
        return out.view(*a.shape[:-1], n)

    def silu_mul_gemm(
        self,
        a: Tensor,
        a_scales: None,
        b1: Tensor,
        b1_scales: Tensor,
        b2: Tensor,
        b2_scales: Tensor,
        alpha: Tensor,
        row_scale: None,
        n: int,
        out_global_scale: None,
        out_dtype: torch.dtype,
    ) -> tuple[Tensor, None]:
        """Compute ``nvfp4_kernels.gemm.silu_mul.op`` with the weights in the fragment layout."""
        weights = [Fragments(b1, b1_scales), Fragments(b2, b2_scales)]
        out = self.product(a.flatten(0, -2), weights, alpha, [n], n, None, out_dtype)
        return out.view(*a.shape[:-1], n), None

    def product(
        self,
        a: Tensor,
        weights: Sequence[Fragments],
        alpha: Tensor,
        shard_sizes: Sequence[int],
        n: int,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Result ``(M, N)`` of ``gemm`` for one weight, or of ``silu_mul_gemm`` for two weights."""
        assert a.ndim == 2
        check_layout("a", a)  # as the kernel's does
        assert sum(shard_sizes) == n
        self.rows.append(a.shape[0])
        products = [
            block_scaled_product(a, None, *blocked_weight(*weight, n, a.shape[1]))
            for weight in weights
        ]
        if len(products) == 2:
            gate, up = (p.mul_(factor) for p, factor in zip(products, alpha, strict=True))
            out = torch.nn.functional.silu(gate).mul_(up)
        else:
            out = products[0].mul_(alpha.repeat_interleave(torch.tensor(list(shard_sizes))))
        return (out if bias is None else out.add_(bias.float())).to(out_dtype)


@contextmanager
def sm90_ops() -> Iterator[Sm90Product]:
    """Context in which ops on CPU tensors run the code path of sm_90."""
    product = Sm90Product()
    module = ModuleType(_LAUNCH)
    vars(module).update(gemm=product.gemm, silu_mul_gemm=product.silu_mul_gemm)
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
