"""``silu_mul_quantize`` for sm_100: gate and up are read once, nothing else leaves but NVFP4."""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Vector
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.compile import launch
from nvfp4_kernels.device.math import LOG2_E
from nvfp4_kernels.device.rowwise.operands import dtype_name, new_operand, new_row_scale, rows_of
from nvfp4_kernels.device.rowwise.output import Output
from nvfp4_kernels.device.rowwise.place import (
    Place,
    ctas,
    find,
    load_block,
    output_pointers,
    pointer,
    steps_ahead,
    store_padding,
)
from nvfp4_kernels.device.rowwise.tile import BLOCK, RowTile
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import multiprocessors
from nvfp4_kernels.silu_mul_quantize.choose import choose_config


@dataclass(frozen=True)
class SiluMulQuantizeSm100:
    """One configuration.

    Attributes:
        dtype: of the input, e.g. ``"bfloat16"``.
        per_token: whether a row's global scale is its own.
        tile: rows and threads.
    """

    dtype: str
    per_token: bool
    tile: RowTile

    def signature(self) -> tuple[Any, ...]:
        x = pointer(TYPES[self.dtype], 32)
        return (x, *output_pointers(), Int32(0), Int32(0), Int32(0), Int64(0))

    @cute.jit
    def __call__(
        self,
        gate_up: cute.Pointer,
        data: cute.Pointer,
        scales: cute.Pointer,
        scale: cute.Pointer,
        m: Int32,
        k: Int32,
        batch: Int32,
        stride: Int64,
        stream: cuda_driver.CUstream,
    ) -> None:
        """``m`` × ``k`` values per matrix; rows of ``gate_up`` are ``stride`` elements apart."""
        self.kernel(gate_up, data, scales, scale, m, k, stride).launch(
            grid=(ctas(self.tile, m, k, batch), 1, 1),
            block=(self.tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        gate_up: cute.Pointer,
        data: cute.Pointer,
        scales: cute.Pointer,
        scale: cute.Pointer,
        m: Int32,
        k: Int32,
        stride: Int64,
    ) -> None:
        place = find(self.tile, m, k)
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        if place.live:
            output = Output(data, scales, scale, self.per_token)
            output.write(place, self._rows(gate_up, place, k, stride))
        else:
            store_padding(place, scales)

    def _rows(self, gate_up: cute.Pointer, place: Place, k: Int32, stride: Int64) -> list[Vector]:
        gate = place.row * stride
        halves, ahead = (gate, gate + k), steps_ahead(gate_up.dtype, inputs=2)
        rows: list[Vector] = []
        for first in place.steps[::ahead]:
            pairs = [
                [load_block(gate_up, at + place.element(s), place.has(s)) for at in halves]
                for s in place.steps[first : first + ahead]
            ]
            rows += [silu(gate) * up for gate, up in pairs]
        return rows


def silu(x: Vector) -> Vector:
    """The value times its sigmoid, in float32, rounded to ``x``'s dtype.

    For 16-bit types exp2 and the reciprocal are the approximations of 2 and 1 ulp: the relative
    error before the last rounding stays below (2·|x| + 8) · 2⁻²⁴, and below -87 the result is -0.
    """
    values = x.to(Float32)
    if x.dtype is Float32:
        return values / (1.0 + cute.math.exp(-values))
    scaled = values * Float32(-LOG2_E)
    powers = [cute.math.exp2(scaled[n], approx=True, ftz=True) for n in range(BLOCK)]
    sums = Vector.from_elements(tuple(powers), Float32) + Float32(1.0)
    sigmoid = [cute.arch.rcp_approx(sums[n]) for n in range(BLOCK)]
    return (values * Vector.from_elements(tuple(sigmoid), Float32)).to(x.dtype)


def silu_mul_quantize(gate_up: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.silu_mul_quantize.op.silu_mul_quantize``."""
    return _run(gate_up, global_scale, per_token=False)


def silu_mul_quantize_per_token(gate_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.silu_mul_quantize.op.silu_mul_quantize_per_token``."""
    row_scale = new_row_scale(gate_up)
    return (*_run(gate_up, row_scale, per_token=True), row_scale)


def _run(gate_up: Tensor, scale: Tensor, per_token: bool) -> tuple[Tensor, Tensor]:
    rows = rows_of("gate_up", gate_up)
    k = rows.k // 2
    data, scales = new_operand(gate_up, k)
    if gate_up.numel():
        tile = choose_config(
            rows.count, k, gate_up.element_size(), per_token, multiprocessors(gate_up.device)
        )
        kernel = SiluMulQuantizeSm100(dtype_name(gate_up), per_token, tile)
        launch(kernel, gate_up, data, scales, scale, rows.m, k, rows.batch, rows.stride)
    return data, scales
