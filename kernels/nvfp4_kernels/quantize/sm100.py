"""``quantize`` for sm_100: one pass over memory."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int64, Vector
from torch import Tensor

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.rowwise.kernel import RowKernel
from nvfp4_kernels.device.rowwise.operands import ALIGNMENT, rows_of
from nvfp4_kernels.device.rowwise.output import (
    OUTPUT_ALIGNMENT,
    OUTPUT_TYPES,
    QuantizedRows,
)
from nvfp4_kernels.device.rowwise.place import (
    Place,
    load_block,
)
from nvfp4_kernels.device.rowwise.tile import RowTile
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.formats.terms import ONE_TERM, TermLayout
from nvfp4_kernels.quantize.call import QuantizeCall
from nvfp4_kernels.quantize.choose import choose_config
from nvfp4_kernels.quantize.host import new_rows
from nvfp4_kernels.runtime.compile import launch


class QuantizeArguments(NamedTuple):
    """Arguments of a launch: input rows, ``stride`` elements apart, and output rows."""

    x: cute.Pointer
    stride: Int64
    out: QuantizedRows


@dataclass(frozen=True)
class QuantizeSm100(RowKernel):
    """One compiled variant of the kernel; a thread quantises 16 elements of a row at a time.

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

    def signature(self) -> tuple[QuantizeArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        types = {"x": TYPES[self.dtype], **OUTPUT_TYPES}
        return (example(QuantizeArguments, types, {"x": ALIGNMENT, **OUTPUT_ALIGNMENT}),)

    def rows(self, arguments: QuantizeArguments, place: Place) -> list[Vector]:
        """Load the blocks that this thread quantises."""
        x, start = arguments.x, place.row * arguments.stride
        return [load_block(x, start + place.element(s), place.has(s)) for s in place.steps]


def quantize(call: QuantizeCall) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.quantize.op.quantize``."""
    x, rows = call.x, rows_of("x", call.x)
    new = new_rows(x, rows, call.output)
    if x.numel():
        sms = device_facts(x.device).sms
        tile = choose_config(rows.count, rows.k, x.element_size(), new.per_token, sms)
        kernel = QuantizeSm100(dtype_name(x.dtype), new.per_token, tile, new.terms)
        launch(kernel, QuantizeArguments(x, rows.stride, new.rows))
    return new.result
