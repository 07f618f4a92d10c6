"""``quantize`` and ``quantize_per_token`` for sm_100: one pass over memory."""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass.cute as cute
from cutlass import Int32, Int64, Vector
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.compile import launch
from nvfp4_kernels.device.rowwise.operands import dtype_name, new_operand, new_row_scale, rows_of
from nvfp4_kernels.device.rowwise.output import Output
from nvfp4_kernels.device.rowwise.place import (
    Place,
    ctas,
    find,
    load_block,
    output_pointers,
    pointer,
    store_padding,
)
from nvfp4_kernels.device.rowwise.tile import RowTile
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import multiprocessors
from nvfp4_kernels.quantize.choose import choose_config


@dataclass(frozen=True)
class QuantizeSm100:
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
        x: cute.Pointer,
        data: cute.Pointer,
        scales: cute.Pointer,
        scale: cute.Pointer,
        m: Int32,
        k: Int32,
        batch: Int32,
        stride: Int64,
        stream: cuda_driver.CUstream,
    ) -> None:
        """``batch`` matrices of ``m`` × ``k``, all rows ``stride`` elements apart."""
        self.kernel(x, data, scales, scale, m, k, stride).launch(
            grid=(ctas(self.tile, m, k, batch), 1, 1),
            block=(self.tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
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
            output.write(place, self._rows(x, place, stride))
        else:
            store_padding(place, scales)

    def _rows(self, x: cute.Pointer, place: Place, stride: Int64) -> list[Vector]:
        start = place.row * stride
        return [load_block(x, start + place.element(s), place.has(s)) for s in place.steps]


def quantize(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.quantize.op.quantize``."""
    return _run(x, global_scale, per_token=False)


def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.quantize.op.quantize_per_token``."""
    row_scale = new_row_scale(x)
    return (*_run(x, row_scale, per_token=True), row_scale)


def _run(x: Tensor, scale: Tensor, per_token: bool) -> tuple[Tensor, Tensor]:
    rows = rows_of("x", x)
    data, scales = new_operand(x, rows.k)
    if x.numel():
        tile = choose_config(
            rows.count, rows.k, x.element_size(), per_token, multiprocessors(x.device)
        )
        kernel = QuantizeSm100(dtype_name(x), per_token, tile)
        launch(kernel, x, data, scales, scale, rows.m, rows.k, rows.batch, rows.stride)
    return data, scales
