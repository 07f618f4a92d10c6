"""Norms that quantise, for sm_100: rows stay in registers from the norm to the quantisation."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int64, Vector
from torch import Tensor

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.rowwise.kernel import RowKernel
from nvfp4_kernels.device.rowwise.operands import ALIGNMENT, check_vector, rows_of
from nvfp4_kernels.device.rowwise.output import (
    OUTPUT_ALIGNMENT,
    OUTPUT_TYPES,
    QuantizedRows,
)
from nvfp4_kernels.device.rowwise.place import (
    Place,
    load_block,
    prefetch_block,
    steps_ahead,
    store_elements,
)
from nvfp4_kernels.device.rowwise.reduction import reduce_row, total
from nvfp4_kernels.device.rowwise.tile import BLOCK, RowTile
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.formats.terms import ONE_TERM, TermLayout
from nvfp4_kernels.quantize.call import RmsNormQuantizeCall
from nvfp4_kernels.quantize.host import new_rows
from nvfp4_kernels.quantize.rms_norm.choose import choose_config
from nvfp4_kernels.runtime.compile import launch


class Inputs(NamedTuple):
    """Input rows, the weight and the new residual; strides count elements between rows.

    ``residual`` and ``residual_out`` are null if no residual is added.
    """

    x: cute.Pointer
    residual: cute.Pointer
    weight: cute.Pointer
    residual_out: cute.Pointer
    stride: Int64
    residual_stride: Int64


class RmsNormQuantizeArguments(NamedTuple):
    """Arguments of a launch."""

    inputs: Inputs
    out: QuantizedRows
    eps: Float32


@dataclass(frozen=True)
class RmsNormQuantizeSm100(RowKernel):
    """One compiled variant of the kernel.

    Attributes:
        dtype: dtype of input, residual and new residual, e.g. ``"bfloat16"``.
        weight_dtype: dtype of the weight.
        adds: whether a residual is added before the norm.
        per_token: whether each row has its own global scale.
        tile: layout of a CTA's threads over whole rows.
        terms: layout of the result's NVFP4 terms.
    """

    dtype: str
    weight_dtype: str
    adds: bool
    per_token: bool
    tile: RowTile
    terms: TermLayout = ONE_TERM

    def signature(self) -> tuple[RmsNormQuantizeArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        rows = dict.fromkeys(("x", "residual", "residual_out"), TYPES[self.dtype])
        types = {**rows, "weight": TYPES[self.weight_dtype], **OUTPUT_TYPES}
        alignment = {**dict.fromkeys((*rows, "weight"), ALIGNMENT), **OUTPUT_ALIGNMENT}
        return (example(RmsNormQuantizeArguments, types, alignment),)

    def prefetch(self, arguments: RmsNormQuantizeArguments, place: Place) -> None:
        """Prefetch the weight to L2."""
        for step in place.steps:
            wanted = place.live & (place.slot == 0) & (place.block(step) < place.blocks)
            prefetch_block(arguments.inputs.weight, place.element(step), wanted)

    def rows(self, arguments: RmsNormQuantizeArguments, place: Place) -> list[Vector]:
        """Load this thread's blocks, add the residual if there is one, and normalise."""
        inputs = arguments.inputs
        rows = self._sums(inputs, place) if self.adds else self._inputs(inputs, place)
        squares = Float32(0.0)
        for row in rows:
            squares = _add_squares(row.to(Float32), squares)
        mean = reduce_row(place, squares, total) / arguments.out.k.to(Float32)
        inverse = 1.0 / cute.math.sqrt(mean + arguments.eps)
        return [self._weigh(inputs, place, step, row, inverse) for step, row in enumerate(rows)]

    def _inputs(self, inputs: Inputs, place: Place) -> list[Vector]:
        start = place.row * inputs.stride
        return [load_block(inputs.x, start + place.element(s), place.has(s)) for s in place.steps]

    def _sums(self, inputs: Inputs, place: Place) -> list[Vector]:
        """Add input and residual in float32; store the rounded sums as the new residual."""
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
    call: RmsNormQuantizeCall, batch_invariant: bool = False
) -> tuple[Tensor, ...]:
    """See ``rms_norm_quantize`` and ``add_rms_norm_quantize`` in ``rms_norm.op``.

    ``call.out`` may alias ``x`` or the residual, as a thread reads each block before writing the
    same block. ``batch_invariant``: see ``choose_config``.
    """
    x, residual, weight = call.x, call.residual, call.weight
    rows = rows_of("x", x)
    residual_rows = rows if residual is None else rows_of("residual", residual)
    check_vector("weight", weight)
    new, adds = new_rows(x, rows, call.output), residual is not None
    out = x.new_empty(x.shape) if adds and call.out is None else call.out
    if x.numel():
        tile = choose_config(rows.count, rows.k, device_facts(x.device).sms, batch_invariant)
        dtypes = dtype_name(x.dtype), dtype_name(weight.dtype)
        kernel = RmsNormQuantizeSm100(*dtypes, adds, new.per_token, tile, new.terms)
        inputs = Inputs(x, residual, weight, out, rows.stride, residual_rows.stride)
        launch(kernel, RmsNormQuantizeArguments(inputs, new.rows, call.eps))
    return new.result if out is None else (*new.result, out)


rms_norm_quantize_batch_invariant = partial(rms_norm_quantize, batch_invariant=True)
