"""Scaling, bias and activation of the epilogue: values of the result from sums."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32

from nvfp4_kernels.activation import SILU
from nvfp4_kernels.device.activation import activated
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.gemm.shards import ShardEnds
from nvfp4_kernels.gemm.sm90.dequantize import UNSCALE
from nvfp4_kernels.gemm.sm90.scheduler import TileCoord, matrix
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile


@dataclass(frozen=True)
class ScalingOperands:
    """Factors and bias in global memory.

    Attributes:
        alpha: float32 [shards], one per shard of the weight's rows, or one per product of a pair;
            if grouped, [experts, products]. With E4M3 activations [n], [products, n] or [experts,
            products, n].
        ends: end of each shard but the last, along the weight's rows.
        row_scale: float32 [m], one per token.
        bias: [n]; if grouped, [experts, products, n].
        out_scale: float32 [1], the scale of an E4M3 result; if grouped, [experts].
    """

    alpha: cute.Pointer
    ends: ShardEnds
    row_scale: cute.Pointer
    bias: cute.Pointer
    out_scale: cute.Pointer


class RowFactors(NamedTuple):
    """Factors and biases of a row of the weight, one per product.

    Attributes:
        scales: alpha, times ``UNSCALE`` unless activations are E4M3.
        biases: empty without a bias.
        exists: whether the row is a row of the weight, if padding is stored as zeros; else None.
    """

    scales: list[Float32]
    biases: list[Float32]
    exists: Boolean | None


@dataclass(frozen=True)
class Scaling:
    """Scaling, bias and activation of single values."""

    tile: Tile
    output: EpilogueConfig

    @cute.jit
    def row(self, operands: ScalingOperands, coord: TileCoord, row: Int32, n: Int32) -> RowFactors:
        """Load the factors and biases of a row; past row ``n - 1`` they are undefined."""
        tile, alpha = self.tile, Array(operands.alpha, shape=(1,))
        products, at = range(tile.weights), cutlass.min(row, n - 1)
        if cutlass.const_expr(tile.fp8):
            scales = [alpha.load(self._first(coord, w, n) + at) for w in products]
        elif cutlass.const_expr(tile.grouped):
            scales = [alpha.load(matrix(tile, coord, w)) * UNSCALE for w in products]
        elif cutlass.const_expr(tile.weights == 2):
            scales = [alpha.load(w) * UNSCALE for w in products]
        else:
            shard = Int32(0)
            for end in cutlass.range_constexpr(self.output.shards - 1):
                shard += Int32(row >= operands.ends[end])
            scales = [alpha.load(shard) * UNSCALE]
        biases: list[Float32] = []
        if cutlass.const_expr(bool(self.output.bias)):
            dtype, bias = TYPES[self.output.bias], Array(operands.bias, shape=(1,))
            biases = [dtype(bias.load(self._first(coord, w, n) + at)).to(Float32) for w in products]
        return RowFactors(scales, biases, row < n if self.output.is_fp8 else None)

    def _first(self, coord: TileCoord, product: int, n: Int32) -> Int32:
        """Index of the first of a product's values, where there is a value for each row."""
        if self.tile.grouped:
            return matrix(self.tile, coord, product) * n
        return Int32(product) * n

    def token(self, operands: ScalingOperands, token: Int32, m: Int32) -> Float32 | None:
        """Factor of a token; past token ``m - 1`` it is undefined. None: no factor."""
        if not self.output.per_token:
            return None
        return Float32(Array(operands.row_scale, shape=(1,)).load(cutlass.min(token, m - 1)))

    def inverse(self, operands: ScalingOperands, coord: TileCoord) -> Float32 | None:
        """Reciprocal of the scale of an E4M3 result; None for other results."""
        if not self.output.is_fp8:
            return None
        expert = coord.expert if self.tile.grouped else Int32(0)
        return 1.0 / Float32(Array(operands.out_scale, shape=(1,)).load(expert))

    def finished(
        self, sums: list[Float32], row: RowFactors, token: Float32 | None, inverse: Float32 | None
    ) -> Float32:
        """Value of the result, from the sums of each product; E4M3 before its conversion.

        Args:
            sums: one per product.
            row: result of ``row``.
            token: result of ``token``.
            inverse: result of ``inverse``.
        """
        values = [part * scale for part, scale in zip(sums, row.scales, strict=True)]
        if token is not None:
            values = [value * token for value in values]
        if self.output.bias:
            values = [value + bias for value, bias in zip(values, row.biases, strict=True)]
        value = values[0]
        if self.tile.weights == 2:
            value = activated(values, self.output.activation or SILU)
        elif self.output.activation is not None:
            value = activated(values, self.output.activation)
        if inverse is not None:
            value = Float32(cutlass.select_(row.exists, value * inverse, Float32(0.0)))
        return value
