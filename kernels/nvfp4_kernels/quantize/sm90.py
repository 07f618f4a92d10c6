"""``quantize`` to E4M3 for sm_90: one pass over memory."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int64, Vector
from torch import Tensor

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.row_vectors.fp8 import OUTPUT_ALIGNMENT, OUTPUT_TYPES, Fp8Rows
from nvfp4_kernels.device.row_vectors.kernel import Fp8RowKernel
from nvfp4_kernels.device.row_vectors.place import Place, load
from nvfp4_kernels.device.row_vectors.tile import VectorTile
from nvfp4_kernels.device.rowwise.operands import rows_of
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.quantize.call import QuantizeCall
from nvfp4_kernels.quantize.choose import choose_fp8_config
from nvfp4_kernels.quantize.fp8_host import ALIGNMENT, new_fp8_rows
from nvfp4_kernels.runtime.compile import launch


class QuantizeFp8Arguments(NamedTuple):
    """Arguments of a launch: input rows, ``stride`` elements apart, and output rows."""

    x: cute.Pointer
    stride: Int64
    out: Fp8Rows


@dataclass(frozen=True)
class QuantizeFp8Sm90(Fp8RowKernel):
    """One compiled variant of the kernel.

    Attributes:
        dtype: dtype of the input, e.g. ``"bfloat16"``.
        per_token: whether each row has its own scale.
        tile: layout of a CTA's threads over a row, or over a part of one.
    """

    dtype: str
    per_token: bool
    tile: VectorTile

    def signature(self) -> tuple[QuantizeFp8Arguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        types = {"x": TYPES[self.dtype], **OUTPUT_TYPES}
        return (example(QuantizeFp8Arguments, types, OUTPUT_ALIGNMENT),)

    def rows(self, arguments: QuantizeFp8Arguments, place: Place, early: Any) -> list[Vector]:
        """Load the vectors that this thread quantises."""
        start = place.row * arguments.stride
        return [load(place, step, arguments.x, start) for step in place.steps]


def quantize(call: QuantizeCall) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.quantize.op.quantize``."""
    x, rows = call.x, rows_of("x", call.x, ALIGNMENT)
    new = new_fp8_rows(x, rows, call.output)
    if x.numel():
        sms = device_facts(x.device).sms
        tile = choose_fp8_config(rows.count, rows.k, x.element_size(), new.per_token, sms)
        kernel = QuantizeFp8Sm90(dtype_name(x.dtype), new.per_token, tile)
        launch(kernel, QuantizeFp8Arguments(x, rows.stride, new.rows))
    return new.result
