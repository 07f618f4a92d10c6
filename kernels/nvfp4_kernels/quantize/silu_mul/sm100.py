"""``silu_mul_quantize`` for sm_100: gate and up are read once, and only NVFP4 is written."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int64, Vector
from torch import Tensor

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.rowwise.kernel import RowKernel
from nvfp4_kernels.device.rowwise.operands import ALIGNMENT, Rows, rows_of
from nvfp4_kernels.device.rowwise.output import (
    OUTPUT_ALIGNMENT,
    OUTPUT_TYPES,
    QuantizedRows,
)
from nvfp4_kernels.device.rowwise.place import (
    Place,
    load_block,
    steps_ahead,
)
from nvfp4_kernels.device.rowwise.tile import RowTile
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.formats.terms import ONE_TERM, TermLayout
from nvfp4_kernels.quantize.call import SiluMulQuantizeCall
from nvfp4_kernels.quantize.host import new_rows
from nvfp4_kernels.quantize.silu_mul.activation import silu
from nvfp4_kernels.quantize.silu_mul.choose import choose_config
from nvfp4_kernels.runtime.compile import launch


class SiluMulQuantizeArguments(NamedTuple):
    """Arguments of a launch: input rows [gate, up], ``stride`` elements apart, and output rows."""

    gate_up: cute.Pointer
    stride: Int64
    out: QuantizedRows


@dataclass(frozen=True)
class SiluMulQuantizeSm100(RowKernel):
    """One compiled variant of the kernel; a thread activates and quantises 16 elements at a time.

    Attributes:
        dtype: dtype of the input, e.g. ``"bfloat16"``.
        per_token: whether each row has its own global scale.
        tile: layout of a CTA's threads over rows.
        terms: layout of the result's NVFP4 terms.
    """

    dtype: str
    per_token: bool
    tile: RowTile
    terms: TermLayout = ONE_TERM

    def signature(self) -> tuple[SiluMulQuantizeArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        types = {"gate_up": TYPES[self.dtype], **OUTPUT_TYPES}
        return (
            example(SiluMulQuantizeArguments, types, {"gate_up": ALIGNMENT, **OUTPUT_ALIGNMENT}),
        )

    def rows(self, arguments: SiluMulQuantizeArguments, place: Place) -> list[Vector]:
        """Compute silu(gate) · up for this thread's blocks."""
        gate_up, gate = arguments.gate_up, place.row * arguments.stride
        halves, ahead = (gate, gate + arguments.out.k), steps_ahead(gate_up.dtype, inputs=2)
        rows: list[Vector] = []
        for first in place.steps[::ahead]:
            pairs = [
                [load_block(gate_up, at + place.element(s), place.has(s)) for at in halves]
                for s in place.steps[first : first + ahead]
            ]
            rows += [silu(gate) * up for gate, up in pairs]
        return rows


def silu_mul_quantize(call: SiluMulQuantizeCall) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.quantize.silu_mul.op.silu_mul_quantize``."""
    gate_up, pairs = call.gate_up, rows_of("gate_up", call.gate_up)
    rows = Rows(pairs.m, pairs.k // 2, pairs.batch, pairs.stride)
    new = new_rows(gate_up, rows, call.output)
    if gate_up.numel():
        sms = device_facts(gate_up.device).sms
        tile = choose_config(rows.count, rows.k, gate_up.element_size(), new.per_token, sms)
        kernel = SiluMulQuantizeSm100(dtype_name(gate_up.dtype), new.per_token, tile, new.terms)
        launch(kernel, SiluMulQuantizeArguments(gate_up, rows.stride, new.rows))
    return new.result
