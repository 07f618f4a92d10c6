"""``silu_mul_quantize`` for sm_90: gate and up are read once, and only E4M3 is written."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int64, Vector
from torch import Tensor

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.row_vectors.fp8 import OUTPUT_ALIGNMENT, OUTPUT_TYPES, Fp8Rows
from nvfp4_kernels.device.row_vectors.kernel import Fp8RowKernel
from nvfp4_kernels.device.row_vectors.place import Place, load, steps_ahead
from nvfp4_kernels.device.row_vectors.tile import VectorTile
from nvfp4_kernels.device.rowwise.operands import Rows, rows_of
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.quantize.call import SiluMulQuantizeCall
from nvfp4_kernels.quantize.fp8_host import ALIGNMENT, new_fp8_rows
from nvfp4_kernels.quantize.silu_mul.activation import silu
from nvfp4_kernels.quantize.silu_mul.choose import choose_fp8_config
from nvfp4_kernels.runtime.compile import launch


class SiluMulQuantizeFp8Arguments(NamedTuple):
    """Arguments of a launch: input rows [gate, up], ``stride`` elements apart, and output rows."""

    gate_up: cute.Pointer
    stride: Int64
    out: Fp8Rows


@dataclass(frozen=True)
class SiluMulQuantizeFp8Sm90(Fp8RowKernel):
    """One compiled variant of the kernel.

    Attributes:
        dtype: dtype of the input, e.g. ``"bfloat16"``.
        per_token: whether each row has its own scale.
        tile: layout of a CTA's threads over a row, or over a part of one.
    """

    dtype: str
    per_token: bool
    tile: VectorTile

    def signature(self) -> tuple[SiluMulQuantizeFp8Arguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        types = {"gate_up": TYPES[self.dtype], **OUTPUT_TYPES}
        return (example(SiluMulQuantizeFp8Arguments, types, OUTPUT_ALIGNMENT),)

    def rows(
        self, arguments: SiluMulQuantizeFp8Arguments, place: Place, early: Any
    ) -> list[Vector]:
        """Compute silu(gate) · up for this thread's vectors."""
        gate_up, gate = arguments.gate_up, place.row * arguments.stride
        halves, ahead = (gate, gate + arguments.out.k), steps_ahead(gate_up.dtype, inputs=2)
        rows: list[Vector] = []
        for first in place.steps[::ahead]:
            pairs = [
                [load(place, step, gate_up, start) for start in halves]
                for step in place.steps[first : first + ahead]
            ]
            rows += [silu(gate) * up for gate, up in pairs]
        return rows


def silu_mul_quantize(call: SiluMulQuantizeCall) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.quantize.silu_mul.op.silu_mul_quantize``."""
    gate_up, pairs = call.gate_up, rows_of("gate_up", call.gate_up, ALIGNMENT)
    rows = Rows(pairs.m, pairs.k // 2, pairs.batch, pairs.stride)
    new = new_fp8_rows(gate_up, rows, call.output)
    if gate_up.numel():
        sms = device_facts(gate_up.device).sms
        tile = choose_fp8_config(rows.count, rows.k, gate_up.element_size(), new.per_token, sms)
        kernel = SiluMulQuantizeFp8Sm90(dtype_name(gate_up.dtype), new.per_token, tile)
        launch(kernel, SiluMulQuantizeFp8Arguments(gate_up, rows.stride, new.rows))
    return new.result
