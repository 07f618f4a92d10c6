"""Scaling of accumulators to the result's float32 values: factors, bias, activation."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.activation import SILU, Activation
from nvfp4_kernels.device.activation import function, limited
from nvfp4_kernels.gemm.shards import ShardEnds
from nvfp4_kernels.gemm.sm100.result import OutputTensor
from nvfp4_kernels.gemm.sm100.scheduler import TileCoord
from nvfp4_kernels.gemm.sm100.silu import multiplied, silu, silu_powers
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile
from nvfp4_kernels.sm100.limits import WARP_ROWS


@dataclass(frozen=True)
class ScalingOperands:
    """Factors and bias in global memory.

    Attributes:
        alpha: float32 [shards], one per shard of the weight's rows, or one per product of a pair;
            if grouped, [experts, products].
        ends: end of each shard but the last, along the weight's rows.
        row_scale: float32 [batch, m], global scale of each token.
        bias: [n]; if grouped, [experts, products, n].
    """

    alpha: cute.Pointer
    ends: ShardEnds
    row_scale: cute.Pointer
    bias: cute.Pointer


@dataclass(frozen=True)
class RowScaling:
    """Factors of one thread's row, one per product; with swap_ab also its biases."""

    scales: list[Float32]
    biases: list[Float32]


@dataclass(frozen=True)
class Begun:
    """Values partway through the activation.

    Attributes:
        values: scaled values; with a pair of products, the gate's.
        ups: with a pair, the up projection's values, to be multiplied by the activated gate; else
            empty.
        powers: e^-x of each value, for SiLU of an even number of values; else empty.
        activation: activation function, or None.
    """

    values: list[Float32]
    ups: list[Float32]
    powers: list[Float32]
    activation: Activation | None


@dataclass(frozen=True)
class Scaling:
    """Epilogue formula: value = sum · alpha · row_scale + bias, then the activation.

    Factors and biases per row are in the thread's registers; vectors along the columns are staged
    in shared memory, one copy per warp.
    """

    tile: Tile
    output: EpilogueConfig

    @cute.jit
    def row_scaling(
        self, operands: ScalingOperands, result: OutputTensor, row: Int32, coord: TileCoord
    ) -> RowScaling:
        """Load the factors and, with swap_ab, the biases of one row of the M side."""
        tile, output = self.tile, self.output
        alpha = Array(operands.alpha, shape=(1,))
        if cutlass.const_expr(tile.grouped):
            first = coord.weight * tile.weights
            scales = [alpha.load(first + product) for product in range(tile.weights)]
        elif cutlass.const_expr(tile.weights == 2):
            scales = [alpha.load(0), alpha.load(1)]
        elif cutlass.const_expr(output.shards == 1):
            scales = [alpha.load(0)]
        elif cutlass.const_expr(tile.swap_ab):
            scales = [alpha.load(self._shard(operands, row))]
        else:
            scales = [Float32(1.0)]
        if cutlass.const_expr(output.row_scale and not tile.swap_ab):
            scale = Float32(0.0)
            if row < result.m:
                scale = Array(operands.row_scale, shape=(1,)).load(coord.batch * result.m + row)
            scales = [s * scale for s in scales]
        biases: list[Float32] = []
        if cutlass.const_expr(bool(output.bias) and tile.swap_ab):
            biases = self._biases(operands, result, row, coord)
        return RowScaling(scales, biases)

    @cute.jit
    def stage_columns(
        self,
        operands: ScalingOperands,
        result: OutputTensor,
        vectors: Array,
        column: Int32,
        coord: TileCoord,
        lane: Int32,
    ) -> None:
        """Stage the column vectors in this warp's shared memory, one lane per column."""
        tile, output = self.tile, self.output
        if cutlass.const_expr(output.column_vectors(tile) > 0):
            ptx.bar_warp_sync(cute.arch.FULL_MASK)  # previous tile's vectors are consumed
            for start in cutlass.range_constexpr(0, tile.split_columns, WARP_ROWS):
                here = column + start + lane
                factor, biases = Float32(1.0), []
                if cutlass.const_expr(tile.swap_ab):
                    if here < result.m:
                        at = coord.batch * result.m + here
                        factor = Array(operands.row_scale, shape=(1,)).load(at)
                else:
                    if cutlass.const_expr(output.shards > 1):
                        if here < result.n:
                            shard = self._shard(operands, here)
                            factor = Array(operands.alpha, shape=(1,)).load(shard)
                    if cutlass.const_expr(bool(output.bias)):
                        biases = self._biases(operands, result, here, coord)
                self._keep(vectors, start + lane, factor, biases)
            ptx.bar_warp_sync(cute.arch.FULL_MASK)

    def apply(
        self, sums: list[Vector], row: RowScaling, vectors: Array, column: Int32 | int
    ) -> list[Float32]:
        """Compute result values from each product's ``sums``, for columns from ``column`` on."""
        return self.finish(self.begin(sums, row, vectors, column))

    def begin(
        self, sums: list[Vector], row: RowScaling, vectors: Array, column: Int32 | int
    ) -> Begun:
        """Scale each product's ``sums``, for columns from ``column`` on; begin the activation."""
        tile, output = self.tile, self.output
        products = [_scaled(s, scale) for s, scale in zip(sums, row.scales, strict=True)]
        along = [
            vectors.load(v * self._length + column, sums[0].shape[0])
            for v in range(output.column_vectors(tile))
        ]
        if along and (tile.swap_ab or output.shards > 1):
            factor = along.pop(0)
            products = [p * factor for p in products]
        if output.bias:
            biases = row.biases if tile.swap_ab else along
            products = [p + bias for p, bias in zip(products, biases, strict=True)]
        activation = output.activation
        if tile.weights == 1:
            return _begun(products[0].to_elements(), [], activation)
        activation = activation or SILU
        gates, ups = (p.to_elements() for p in products)
        pairs = [limited([*pair], activation) for pair in zip(gates, ups, strict=True)]
        return _begun([gate for gate, _ in pairs], [up for _, up in pairs], activation)

    def finish(self, begun: Begun) -> list[Float32]:
        """Finish the activation and return the result's values, see ``Activation.gated``."""
        values = _activated(begun)
        if not begun.ups:
            return values
        return multiplied(values, begun.ups)

    def _biases(
        self, operands: ScalingOperands, result: OutputTensor, n: Int32, coord: TileCoord
    ) -> list[Float32]:
        """Bias of each product for row ``n`` of the weights; undefined past the last row."""
        tile = self.tile
        at = cutlass.min(n, result.n - 1)
        bias = Array(operands.bias, shape=(1,))
        first = coord.weight * tile.weights if tile.grouped else 0
        return [Float32(bias.load((first + w) * result.n + at)) for w in range(tile.weights)]

    def _shard(self, operands: ScalingOperands, n: Int32) -> Int32:
        """Index of the shard that row ``n`` of the weights belongs to."""
        shard = Int32(0)
        for end in operands.ends[: self.output.shards - 1]:
            shard += Int32(n >= end)
        return shard

    def _keep(self, vectors: Array, column: Int32, factor: Float32, biases: list[Float32]) -> None:
        kept = [factor] if self.tile.swap_ab or self.output.shards > 1 else []
        kept += biases
        for vector, value in enumerate(kept):
            vectors.store(value, vector * self._length + column)

    @property
    def _length(self) -> int:
        return self.output.vector_length(self.tile)


def _scaled(sums: Vector, scale: Float32) -> Vector:
    """Scale ``sums`` with packed multiplications, two values at a time."""
    values = list(sums.to_elements())
    return Vector.from_elements(tuple(multiplied(values, [scale] * len(values))), Float32)


def _begun(values: list[Float32], ups: list[Float32], activation: Activation | None) -> Begun:
    powers: list[Float32] = []
    if activation is not None and activation.name == "silu" and len(values) % 2 == 0:
        powers = silu_powers(values)
    return Begun(values, ups, powers, activation)


def _activated(begun: Begun) -> list[Float32]:
    """Activated values of a single projection, or of the gate."""
    if begun.activation is None:
        return begun.values
    if begun.powers:
        return silu(begun.values, begun.powers)
    return [function(value, begun.activation) for value in begun.values]
