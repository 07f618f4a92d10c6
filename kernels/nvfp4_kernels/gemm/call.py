"""Arguments of a GEMM op as one value, passed to argument checks, reference and launch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.formats.output import Static, StaticFp8

Weights = tuple[tuple[Tensor, Tensor], ...]


class GemmCall(NamedTuple):
    """Arguments of ``gemm``, which documents them, in the order of the torch op's schema.

    Attributes:
        out_dtype: dtype of a floating-point result; unused with ``output``.
        output: format of a quantised result; None: floating point.
    """

    a: Tensor
    a_scales: Tensor | None
    b: Tensor
    b_scales: Tensor
    alpha: Tensor
    shard_sizes: Sequence[int]
    row_scale: Tensor | None
    bias: Tensor | None
    out_dtype: torch.dtype
    terms: int = 1
    output: Static | StaticFp8 | None = None

    @property
    def rows(self) -> int:
        """Number of rows of the weight, N."""
        return sum(self.shard_sizes)

    @property
    def weights(self) -> Weights:
        """Data and scales of each weight: a single pair."""
        return ((self.b, self.b_scales),)


class SiluMulGemmCall(NamedTuple):
    """Arguments of ``silu_mul_gemm``, which documents them, in the order of the op's schema.

    Attributes:
        out_dtype: see ``GemmCall``.
        output: see ``GemmCall``.
    """

    a: Tensor
    a_scales: Tensor | None
    b1: Tensor
    b1_scales: Tensor
    b2: Tensor
    b2_scales: Tensor
    alpha: Tensor
    row_scale: Tensor | None
    n: int | None
    out_dtype: torch.dtype
    terms: int = 1
    output: Static | StaticFp8 | None = None

    @property
    def rows(self) -> int:
        """Number of rows of each weight, N."""
        return self.b1.shape[-2] if self.n is None else self.n

    @property
    def weights(self) -> Weights:
        """Data and scales of each weight: gate, then up."""
        return (self.b1, self.b1_scales), (self.b2, self.b2_scales)

    @property
    def shard_sizes(self) -> Sequence[int]:
        """Output widths of the shards: a pair of weights has a single shard, N wide."""
        return (self.rows,)

    @property
    def bias(self) -> None:
        """Bias: always None, as ``silu_mul_gemm`` takes no bias."""
        return None


class GroupedGemmCall(NamedTuple):
    """Arguments of ``grouped_gemm`` and ``grouped_silu_mul_gemm``, which document them.

    An expert has a single weight in ``grouped_gemm``, gate and up in ``grouped_silu_mul_gemm``.

    Attributes:
        out_dtype: see ``GemmCall``.
        output: see ``GemmCall``; its global scale is a tensor with one element per expert.
        routed_before: whether ``groups`` was complete before the preceding launch began, as for a
            layer's second GEMM, preceded by the first. If so, weights are loaded before the
            preceding launch has ended. If wrongly set, behaviour is undefined. Unused on a CPU.
        global_experts: number of experts of all ranks, over which slots (token-expert pairs) are
            spread; None: this rank has all experts. Affects only the tile chosen on sm_90, not the
            result.
    """

    a: Tensor
    a_scales: Tensor | None
    groups: Tensor
    b: Tensor
    b_scales: Tensor
    alpha: Tensor
    row_scale: Tensor | None
    bias: Tensor | None
    n: int | None
    activation: Activation | None
    out_dtype: torch.dtype
    terms: int = 1
    output: Static | StaticFp8 | None = None
    routed_before: bool = False
    global_experts: int | None = None

    @property
    def rows(self) -> int:
        """Number of rows of each weight, N."""
        return self.b.shape[-2] if self.n is None else self.n


ProductCall = GemmCall | SiluMulGemmCall
AnyCall = ProductCall | GroupedGemmCall
