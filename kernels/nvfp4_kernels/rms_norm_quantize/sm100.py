"""``rms_norm_quantize`` and its siblings for sm_100: rows stay in registers between the passes."""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Vector
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.compile import launch
from nvfp4_kernels.device.rowwise.operands import (
    check_vector,
    dtype_name,
    new_operand,
    new_row_scale,
    rows_of,
)
from nvfp4_kernels.device.rowwise.output import Output
from nvfp4_kernels.device.rowwise.place import (
    Place,
    ctas,
    find,
    load_block,
    output_pointers,
    pointer,
    prefetch_block,
    steps_ahead,
    store_elements,
    store_padding,
)
from nvfp4_kernels.device.rowwise.reduction import reduce_row, total
from nvfp4_kernels.device.rowwise.tile import BLOCK, RowTile
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import multiprocessors
from nvfp4_kernels.rms_norm_quantize.choose import choose_config


@dataclass(frozen=True)
class Inputs:
    """Rows to read, and the residual to write; ``stride`` counts elements between rows."""

    x: cute.Pointer
    residual: cute.Pointer
    weight: cute.Pointer
    residual_out: cute.Pointer
    stride: Int64
    residual_stride: Int64


@dataclass(frozen=True)
class RmsNormQuantizeSm100:
    """One configuration.

    Attributes:
        dtype: of input, residual and new residual, e.g. ``"bfloat16"``.
        weight_dtype: of the weight.
        adds: whether a residual is added first.
        per_token: whether a row's global scale is its own.
        tile: rows and threads; covers whole rows.
    """

    dtype: str
    weight_dtype: str
    adds: bool
    per_token: bool
    tile: RowTile

    def signature(self) -> tuple[Any, ...]:
        rows, weight = pointer(TYPES[self.dtype], 32), pointer(TYPES[self.weight_dtype], 32)
        sizes = (Int32(0), Int32(0), Int32(0), Int64(0), Int64(0))
        return (rows, rows, weight, rows, *output_pointers(), *sizes, Float32(0.0))

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        residual: cute.Pointer,
        weight: cute.Pointer,
        residual_out: cute.Pointer,
        data: cute.Pointer,
        scales: cute.Pointer,
        scale: cute.Pointer,
        m: Int32,
        k: Int32,
        batch: Int32,
        stride: Int64,
        residual_stride: Int64,
        eps: Float32,
        stream: cuda_driver.CUstream,
    ) -> None:
        """``batch`` matrices of ``m`` × ``k``; without a residual, its pointers are null."""
        inputs = Inputs(x, residual, weight, residual_out, stride, residual_stride)
        self.kernel(inputs, data, scales, scale, m, k, eps).launch(
            grid=(ctas(self.tile, m, k, batch), 1, 1),
            block=(self.tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        inputs: Inputs,
        data: cute.Pointer,
        scales: cute.Pointer,
        scale: cute.Pointer,
        m: Int32,
        k: Int32,
        eps: Float32,
    ) -> None:
        place = find(self.tile, m, k)
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        for step in cutlass.range_constexpr(self.tile.steps):
            wanted = place.live & (place.slot == 0) & (place.block(step) < place.blocks)
            prefetch_block(inputs.weight, place.element(step), wanted)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        if place.live:
            output = Output(data, scales, scale, self.per_token)
            output.write(place, self._normalise(inputs, place, k, eps))
        else:
            store_padding(place, scales)

    def _normalise(self, inputs: Inputs, place: Place, k: Int32, eps: Float32) -> list[Vector]:
        rows = self._sums(inputs, place) if self.adds else self._inputs(inputs, place)
        squares = Float32(0.0)
        for row in rows:
            squares = _add_squares(row.to(Float32), squares)
        mean = reduce_row(place, squares, total) / k.to(Float32)
        inverse = 1.0 / cute.math.sqrt(mean + eps)
        return [self._weigh(inputs, place, step, row, inverse) for step, row in enumerate(rows)]

    def _inputs(self, inputs: Inputs, place: Place) -> list[Vector]:
        start = place.row * inputs.stride
        return [load_block(inputs.x, start + place.element(s), place.has(s)) for s in place.steps]

    def _sums(self, inputs: Inputs, place: Place) -> list[Vector]:
        """The float32 sums; rounded, they are the new residual."""
        starts = (
            (inputs.x, place.row * inputs.stride),
            (inputs.residual, place.row * inputs.residual_stride),
        )
        ahead = steps_ahead(inputs.x.dtype, inputs=2)
        rows: list[Vector] = []
        for first in place.steps[::ahead]:
            pairs = [
                [load_block(p, start + place.element(s), place.has(s)) for p, start in starts]
                for s in place.steps[first : first + ahead]
            ]
            for step, (x, residual) in enumerate(pairs, first):
                rows.append(x.to(Float32) + residual.to(Float32))
                store_elements(place, step, rows[-1].to(x.dtype), inputs.residual_out)
        return rows

    def _weigh(
        self, inputs: Inputs, place: Place, step: int, row: Vector, inverse: Float32
    ) -> Vector:
        wanted = place.block(step) < place.blocks
        weight = load_block(inputs.weight, place.element(step), wanted, streamed=False)
        normalised = (row.to(Float32) * inverse).to(weight.dtype)
        return (normalised * weight).to(TYPES[self.dtype])


def _add_squares(values: Vector, squares: Float32) -> Float32:
    for n in range(BLOCK):
        squares = cute.math.fma(values[n], values[n], squares)
    return squares


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, global_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.rms_norm_quantize.op.rms_norm_quantize``."""
    return _run(x, weight, eps, global_scale)


def rms_norm_quantize_per_token(
    x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.rms_norm_quantize.op.rms_norm_quantize_per_token``."""
    row_scale = new_row_scale(x)
    return (*_run(x, weight, eps, row_scale, per_token=True), row_scale)


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, global_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.rms_norm_quantize.op.add_rms_norm_quantize``."""
    out = x.new_empty(x.shape)
    return (*_run(x, weight, eps, global_scale, residual, out), out)


def add_rms_norm_quantize_per_token(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.rms_norm_quantize.op.add_rms_norm_quantize_per_token``."""
    row_scale, out = new_row_scale(x), x.new_empty(x.shape)
    return (*_run(x, weight, eps, row_scale, residual, out, per_token=True), row_scale, out)


def _run(
    x: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
    per_token: bool = False,
) -> tuple[Tensor, Tensor]:
    rows = rows_of("x", x)
    residual_rows = rows if residual is None else rows_of("residual", residual)
    check_vector("weight", weight)
    data, scales = new_operand(x, rows.k)
    if x.numel():
        tile = choose_config(rows.count, rows.k, multiprocessors(x.device))
        dtypes = dtype_name(x), dtype_name(weight)
        kernel = RmsNormQuantizeSm100(*dtypes, residual is not None, per_token, tile)
        launch(
            kernel, x, residual, weight, residual_out, data, scales, scale,
            rows.m, rows.k, rows.batch, rows.stride, residual_rows.stride, eps,
        )  # fmt: skip
    return data, scales
