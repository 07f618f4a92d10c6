"""Norms that quantise to E4M3, for sm_90: rows stay in registers from the norm to quantisation."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int64, Vector
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.row_vectors.fp8 import OUTPUT_ALIGNMENT, OUTPUT_TYPES, Fp8Rows
from nvfp4_kernels.device.row_vectors.kernel import Fp8RowKernel
from nvfp4_kernels.device.row_vectors.place import Place, load, squares, steps_ahead, store
from nvfp4_kernels.device.row_vectors.reduction import reduce_cta, total
from nvfp4_kernels.device.row_vectors.tile import VectorTile
from nvfp4_kernels.device.rowwise.operands import check_vector, rows_of
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.norm.choose import choose_config
from nvfp4_kernels.norm.tile import MAX_K
from nvfp4_kernels.quantize.call import RmsNormQuantizeCall
from nvfp4_kernels.quantize.fp8_host import ALIGNMENT, new_fp8_rows
from nvfp4_kernels.runtime.compile import launch


class Fp8NormInputs(NamedTuple):
    """Input rows, the weight and the new residual; strides count elements between rows.

    ``residual`` and ``residual_out`` are null if no residual is added.
    """

    x: cute.Pointer
    residual: cute.Pointer
    weight: cute.Pointer
    residual_out: cute.Pointer
    stride: Int64
    residual_stride: Int64


class RmsNormQuantizeFp8Arguments(NamedTuple):
    """Arguments of a launch."""

    inputs: Fp8NormInputs
    out: Fp8Rows
    eps: Float32


@dataclass(frozen=True)
class RmsNormQuantizeFp8Sm90(Fp8RowKernel):
    """One compiled variant of the kernel: a CTA per row, with the operations of ``add_rms_norm``.

    Attributes:
        dtype: dtype of input, residual and new residual, e.g. ``"bfloat16"``.
        weight_dtype: dtype of the weight.
        adds: whether a residual is added before the norm.
        per_token: whether each row has its own scale.
        tile: layout of a CTA's threads over a row.
    """

    dtype: str
    weight_dtype: str
    adds: bool
    per_token: bool
    tile: VectorTile

    @property
    def whole_rows(self) -> bool:
        return True

    def signature(self) -> tuple[RmsNormQuantizeFp8Arguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        types = dict.fromkeys(("x", "residual", "residual_out"), TYPES[self.dtype])
        types |= {"weight": TYPES[self.weight_dtype], **OUTPUT_TYPES}
        return (example(RmsNormQuantizeFp8Arguments, types, OUTPUT_ALIGNMENT),)

    def early(self, arguments: RmsNormQuantizeFp8Arguments, place: Place) -> list[Vector]:
        """Load the weight."""
        return [load(place, step, arguments.inputs.weight, Int64(0)) for step in place.steps]

    def rows(
        self, arguments: RmsNormQuantizeFp8Arguments, place: Place, early: Any
    ) -> list[Vector]:
        """Load this thread's vectors, add the residual if there is one, and normalise."""
        sums = self._sums(arguments.inputs, place)
        summed = Float32(0.0)
        for step in place.steps:
            summed = summed + squares(place, step, sums[step])
        mean = reduce_cta(place.tile.warps, summed, total) / place.k.to(Float32)
        inverse = 1.0 / cute.math.sqrt(mean + arguments.eps)
        return [
            ((sums[step] * inverse).to(early[step].dtype) * early[step]).to(TYPES[self.dtype])
            for step in place.steps
        ]

    def _sums(self, inputs: Fp8NormInputs, place: Place) -> list[Vector]:
        """Input rows in float32, with the residual added; store the rounded sums."""
        starts = [(inputs.x, place.row * inputs.stride)]
        if self.adds:
            starts.append((inputs.residual, place.row * inputs.residual_stride))
        ahead = steps_ahead(inputs.x.dtype, inputs=len(starts))
        sums: list[Vector] = []
        for first in place.steps[::ahead]:
            loaded = [
                [load(place, step, source, start) for source, start in starts]
                for step in place.steps[first : first + ahead]
            ]
            for step, (own, *residual) in enumerate(loaded, first):
                sums.append(own.to(Float32))
                for before in residual:
                    sums[-1] = sums[-1] + before.to(Float32)
                    rounded = sums[-1].to(own.dtype)
                    store(place, step, inputs.residual_out, place.row * place.k, rounded)
        return sums


def rms_norm_quantize(call: RmsNormQuantizeCall) -> tuple[Tensor, ...]:
    """See ``rms_norm_quantize`` and ``add_rms_norm_quantize`` in ``rms_norm.op``.

    ``call.out`` may alias ``x`` or the residual, as a thread reads each vector before writing the
    same vector.
    """
    x, residual, weight = call.x, call.residual, call.weight
    rows = rows_of("x", x, ALIGNMENT)
    residual_rows = rows if residual is None else rows_of("residual", residual, ALIGNMENT)
    check_vector("weight", weight, ALIGNMENT)
    if rows.k > MAX_K:
        arch = device_facts(x.device).arch
        raise InvalidArgument(
            f"x: K is {rows.k}, must be at most {MAX_K} on {arch}; normalise longer rows with torch"
        )
    new, adds = new_fp8_rows(x, rows, call.output), residual is not None
    out = x.new_empty(x.shape) if adds and call.out is None else call.out
    if x.numel():
        dtypes = dtype_name(x.dtype), dtype_name(weight.dtype)
        tile = choose_config(rows.k)
        kernel = RmsNormQuantizeFp8Sm90(*dtypes, adds, new.per_token, tile)
        inputs = Fp8NormInputs(x, residual, weight, out, rows.stride, residual_rows.stride)
        launch(kernel, RmsNormQuantizeFp8Arguments(inputs, new.rows, call.eps))
    return new.result if out is None else (*new.result, out)
