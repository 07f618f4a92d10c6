"""``rms_norm_quantize`` and its siblings for sm_100: rows stay in registers between the passes."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Vector
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.rowwise.operands import (
    ALIGNMENT,
    check_vector,
    new_operand,
    new_row_scale,
    rows_of,
)
from nvfp4_kernels.device.rowwise.output import (
    OUTPUT_ALIGNMENT,
    OUTPUT_TYPES,
    QuantizedRows,
    RowQuantizer,
)
from nvfp4_kernels.device.rowwise.place import (
    Place,
    ctas,
    find,
    load_block,
    prefetch_block,
    steps_ahead,
    store_elements,
    store_padding,
)
from nvfp4_kernels.device.rowwise.reduction import reduce_row, total
from nvfp4_kernels.device.rowwise.tile import BLOCK, RowTile
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import dtype_name, multiprocessors
from nvfp4_kernels.formats.terms import ONE_TERM, TermLayout
from nvfp4_kernels.quantize.rms_norm.choose import choose_config
from nvfp4_kernels.runtime.compile import launch


class Inputs(NamedTuple):
    """Input rows, and the new residual; ``stride`` counts elements between rows.

    Without a residual, the residual's pointers are null.
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
class RmsNormQuantizeSm100:
    """One configuration.

    Attributes:
        dtype: dtype of input, residual and new residual, e.g. ``"bfloat16"``.
        weight_dtype: dtype of the weight.
        adds: whether a residual is added first.
        per_token: whether each row has its own global scale.
        tile: rows and threads; covers whole rows.
        terms: NVFP4 terms of the result.
    """

    dtype: str
    weight_dtype: str
    adds: bool
    per_token: bool
    tile: RowTile
    terms: TermLayout = ONE_TERM

    def signature(self) -> tuple[RmsNormQuantizeArguments]:
        """One example of ``__call__``'s bundle of arguments."""
        rows = dict.fromkeys(("x", "residual", "residual_out"), TYPES[self.dtype])
        types = {**rows, "weight": TYPES[self.weight_dtype], **OUTPUT_TYPES}
        alignment = {**dict.fromkeys((*rows, "weight"), ALIGNMENT), **OUTPUT_ALIGNMENT}
        return (example(RmsNormQuantizeArguments, types, alignment),)

    @cute.jit
    def __call__(self, arguments: RmsNormQuantizeArguments, stream: cuda_driver.CUstream) -> None:
        """Launch a CTA for each tile of rows that have scales, padding included."""
        out = arguments.out
        self.kernel(arguments).launch(
            grid=(ctas(self.tile, out.m, out.k, out.batch), 1, 1),
            block=(self.tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: RmsNormQuantizeArguments) -> None:
        """Normalise and quantise one CTA's rows, or zero the scales of padding."""
        inputs, out = arguments.inputs, arguments.out
        place = find(self.tile, out.m, out.k, self.terms)
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        for step in cutlass.range_constexpr(self.tile.steps):
            wanted = place.live & (place.slot == 0) & (place.block(step) < place.blocks)
            prefetch_block(inputs.weight, place.element(step), wanted)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        if place.live:
            quantizer = RowQuantizer(out.data, out.scales, out.scale, self.per_token)
            quantizer.write(place, self._normalise(inputs, place, out.k, arguments.eps))
        else:
            store_padding(place, out.scales)

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
        """Float32 sums of input and residual; stores the rounded sums as the new residual."""
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
    x: Tensor,
    weight: Tensor,
    eps: float,
    global_scale: Tensor,
    terms: int = 1,
    *,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.quantize.rms_norm.op.rms_norm_quantize``."""
    return _run(x, weight, eps, terms, global_scale, batch_invariant=batch_invariant)


def rms_norm_quantize_per_token(
    x: Tensor, weight: Tensor, eps: float, terms: int = 1, *, batch_invariant: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.quantize.rms_norm.op.rms_norm_quantize_per_token``."""
    row_scale = new_row_scale(x)
    given = x, weight, eps, terms, row_scale
    found = _run(*given, per_token=True, batch_invariant=batch_invariant)
    return (*found, row_scale)


def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    global_scale: Tensor,
    terms: int = 1,
    out: Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.quantize.rms_norm.op.add_rms_norm_quantize``.

    ``out`` takes the new residual: contiguous, of x's dtype and shape. ``out`` may alias x or the
    residual, as a thread reads each block before writing the same block.
    """
    if out is None:
        out = x.new_empty(x.shape)
    given = x, weight, eps, terms, global_scale, residual, out
    return (*_run(*given, batch_invariant=batch_invariant), out)


def add_rms_norm_quantize_per_token(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    terms: int = 1,
    *,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.quantize.rms_norm.op.add_rms_norm_quantize_per_token``."""
    row_scale, out = new_row_scale(x), x.new_empty(x.shape)
    given = x, weight, eps, terms, row_scale, residual, out
    found = _run(*given, per_token=True, batch_invariant=batch_invariant)
    return (*found, row_scale, out)


rms_norm_quantize_batch_invariant = partial(rms_norm_quantize, batch_invariant=True)
rms_norm_quantize_per_token_batch_invariant = partial(
    rms_norm_quantize_per_token, batch_invariant=True
)
add_rms_norm_quantize_batch_invariant = partial(add_rms_norm_quantize, batch_invariant=True)
add_rms_norm_quantize_per_token_batch_invariant = partial(
    add_rms_norm_quantize_per_token, batch_invariant=True
)


def _run(
    x: Tensor,
    weight: Tensor,
    eps: float,
    terms: int,
    scale: Tensor,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
    per_token: bool = False,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    rows = rows_of("x", x)
    residual_rows = rows if residual is None else rows_of("residual", residual)
    check_vector("weight", weight)
    data, scales = new_operand(x, rows.k, terms)
    if x.numel():
        tile = choose_config(rows.count, rows.k, multiprocessors(x.device), batch_invariant)
        dtypes = dtype_name(x.dtype), dtype_name(weight.dtype)
        layout = TermLayout.of(terms, rows.m)
        kernel = RmsNormQuantizeSm100(*dtypes, residual is not None, per_token, tile, layout)
        inputs = Inputs(x, residual, weight, residual_out, rows.stride, residual_rows.stride)
        out = QuantizedRows(data, scales, scale, rows.m, rows.k, rows.batch)
        launch(kernel, RmsNormQuantizeArguments(inputs, out, eps))
    return data, scales
