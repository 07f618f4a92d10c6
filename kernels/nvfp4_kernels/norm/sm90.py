"""The kernel of ``add_rms_norm`` on sm_90, and its launch."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Vector
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_layout, check_rows, strides_of
from nvfp4_kernels.device.arguments import example, without_unread
from nvfp4_kernels.device.row_vectors.place import Place, find, load, squares, store
from nvfp4_kernels.device.row_vectors.reduction import reduce_cta, total
from nvfp4_kernels.device.row_vectors.tile import VECTOR, VectorTile
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.norm.call import AddRmsNormCall
from nvfp4_kernels.norm.choose import choose_config
from nvfp4_kernels.norm.tile import MAX_K
from nvfp4_kernels.runtime.compile import launch


class RowMatrix(NamedTuple):
    """Matrix [row, K] in global memory; ``stride`` counts elements between rows."""

    data: cute.Pointer
    stride: Int64


class NormArguments(NamedTuple):
    """Arguments of a launch.

    Attributes:
        x, residual: inputs [m, k].
        out, residual_out: results [m, k].
        weight: [k].
        m, k: number of rows, and of elements per row.
        eps: number added to the mean square.
    """

    x: RowMatrix
    residual: RowMatrix
    out: RowMatrix
    residual_out: RowMatrix
    weight: cute.Pointer
    m: Int32
    k: Int32
    eps: Float32


@dataclass(frozen=True)
class AddRmsNormSm90:
    """Residual addition and RMS norm: one CTA per row, with the row in registers throughout.

    Attributes:
        dtype: dtype of all tensors, ``"bfloat16"`` or ``"float16"``.
        tile: thread layout that covers a row.
    """

    dtype: str
    tile: VectorTile

    def signature(self) -> tuple[NormArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        return (example(NormArguments, dict.fromkeys(("data", "weight"), TYPES[self.dtype])),)

    @cute.jit
    def __call__(self, arguments: NormArguments, stream: cuda_driver.CUstream) -> None:
        """Launch a CTA per row."""
        self.kernel(without_unread(arguments, ["m"])).launch(
            grid=(arguments.m, 1, 1), block=(self.tile.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, arguments: NormArguments) -> None:
        """Load the weight before the wait for preceding kernels, then add and normalise."""
        dtype, place = TYPES[self.dtype], find(self.tile, arguments.k, whole_rows=True)
        inputs = (arguments.x, arguments.residual)
        # At once: the next kernel loads its weights while the preceding kernel ends.
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        factors = [load(place, step, arguments.weight, Int64(0)) for step in place.steps]
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        pairs = [
            [load(place, step, each.data, place.row * each.stride) for each in inputs]
            for step in place.steps
        ]
        sums = [own.to(Float32) + before.to(Float32) for own, before in pairs]
        summed = Float32(0.0)
        for step in place.steps:
            _store(place, step, arguments.residual_out, sums[step].to(dtype))
            summed = summed + squares(place, step, sums[step])
        mean = reduce_cta(self.tile.warps, summed, total) / arguments.k.to(Float32)
        inverse = 1.0 / cute.math.sqrt(mean + arguments.eps)
        for step in place.steps:
            normalised = (sums[step] * inverse).to(dtype) * factors[step]
            _store(place, step, arguments.out, normalised)


def _store(place: Place, step: int, target: RowMatrix, values: Vector) -> None:
    store(place, step, target.data, place.row * target.stride, values)


def add_rms_norm(call: AddRmsNormCall) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.norm.op.add_rms_norm``.

    Raises:
        InvalidArgument: K is too large or not a multiple of 8, or elements of a row are not
            contiguous, or rows are misaligned.
    """
    x, residual, weight, eps = call
    (m, k), arch = x.shape, device_facts(x.device).arch
    if k % VECTOR:
        raise InvalidArgument(
            f"x: K is {k}, must be a multiple of {VECTOR} on {arch}; normalise such rows with torch"
        )
    for name, rows in (("x", x), ("residual", residual)):
        if rows.stride(1) != 1:
            raise InvalidArgument(
                f"{name}: strides are {rows.stride()}, the last must be 1; call contiguous() on it"
            )
    check_rows(arch, x=x, residual=residual)
    check_layout("weight", weight)
    if k > MAX_K:
        raise InvalidArgument(
            f"x: K is {k}, must be at most {MAX_K} on {arch}; normalise longer rows with torch"
        )
    out, residual_out = x.new_empty(x.shape), x.new_empty(x.shape)
    if m:
        arguments = NormArguments(
            x=RowMatrix(x, strides_of(x)[0]),
            residual=RowMatrix(residual, strides_of(residual)[0]),
            out=RowMatrix(out, k),
            residual_out=RowMatrix(residual_out, k),
            weight=weight,
            m=m,
            k=k,
            eps=eps,
        )
        launch(AddRmsNormSm90(dtype_name(x.dtype), choose_config(k)), arguments)
    return out, residual_out
