"""Arguments of a GEMM op as one value, passed to argument checks, reference and launch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.formats.output import Static

Weights = tuple[tuple[Tensor, Tensor], ...]


class GemmCall(NamedTuple):
    """Arguments of ``gemm``, documented there, in the order of the torch op's schema.

    Attributes:
        out_dtype: dtype of a floating-point result; unused with ``output``.
        output: format of an NVFP4 result; None: floating point.
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
    output: Static | None = None

    @property
    def rows(self) -> int:
        """Number of rows of the weight, N."""
        return sum(self.shard_sizes)

    @property
    def weights(self) -> Weights:
        """Data and scales of the weight."""
        return ((self.b, self.b_scales),)


class SiluMulGemmCall(NamedTuple):
    """Arguments of ``silu_mul_gemm``, documented there, in the order of the torch op's schema.

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
    output: Static | None = None

    @property
    def rows(self) -> int:
        """Number of rows of each weight, N."""
        return self.b1.shape[-2] if self.n is None else self.n

    @property
    def weights(self) -> Weights:
        """Data and scales of gate and up."""
        return (self.b1, self.b1_scales), (self.b2, self.b2_scales)

    @property
    def shard_sizes(self) -> Sequence[int]:
        """Output widths of the shards: one shard, as the weights are a pair."""
        return (self.rows,)

    @property
    def bias(self) -> None:
        """Bias: always None, as a pair of weights has none."""
        return None


class GroupedGemmCall(NamedTuple):
    """Arguments of ``grouped_gemm`` and ``grouped_silu_mul_gemm``, documented there.

    ``b`` and ``alpha`` belong to a single weight per expert, or to gate and up.

    Attributes:
        out_dtype: see ``GemmCall``.
        output: see ``GemmCall``; with a global scale for each expert.
        routed_before: whether ``groups`` was complete before the preceding launch began, as for a
            layer's second GEMM, preceded by the first. Weights are then loaded before that launch
            has ended. If wrongly set, behaviour is undefined. Unused on a CPU.
        global_experts: experts of all ranks, over which slots are spread; None: this rank has all.
            Affects only the choice of a tile on sm_90, not the result.
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
    output: Static | None = None
    routed_before: bool = False
    global_experts: int | None = None

    @property
    def rows(self) -> int:
        """Number of rows of each weight, N."""
        return self.b.shape[-2] if self.n is None else self.n


ProductCall = GemmCall | SiluMulGemmCall
AnyCall = ProductCall | GroupedGemmCall
