"""The kernel of ``add_rms_norm`` on sm_90, and its launch."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Float32, Int32, Int64, Vector
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_layout, check_rows, strides_of
from nvfp4_kernels.device.arguments import example, without_unread
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.norm.call import AddRmsNormCall
from nvfp4_kernels.norm.choose import choose_config
from nvfp4_kernels.norm.tile import MAX_K, VECTOR, WARP, NormTile
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
    tile: NormTile

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
        steps, dtype, k = range(self.tile.steps), TYPES[self.dtype], arguments.k
        inputs = (arguments.x, arguments.residual)
        # At once: the next kernel loads its weights while the preceding kernel ends.
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        row = Int64(cute.arch.block_idx()[0])
        factors = [self._load(arguments.weight, Int64(0), step, k) for step in steps]
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        pairs = [
            [self._load(each.data, row * each.stride, step, k) for each in inputs] for step in steps
        ]
        sums = [own.to(Float32) + before.to(Float32) for own, before in pairs]
        squares = Float32(0.0)
        for step in steps:
            self._store(arguments.residual_out, row, step, sums[step].to(dtype), k)
            squares = squares + self._squares(sums[step], step, k)
        mean = self._total(squares) / k.to(Float32)
        inverse = 1.0 / cute.math.sqrt(mean + arguments.eps)
        for step in steps:
            normalised = (sums[step] * inverse).to(dtype) * factors[step]
            self._store(arguments.out, row, step, normalised, k)

    def _element(self, step: int) -> Int32:
        """Index in the row of the first element of this thread's vector in ``step``."""
        return (step * self.tile.threads + cute.arch.thread_idx()[0]) * VECTOR

    def _load(self, source: cute.Pointer, start: Int64, step: int, k: Int32) -> Vector:
        # Clamped past the row's end: a branch would keep loads from being issued together.
        element = cutlass.min(self._element(step), k - VECTOR)
        return Vector(Array(source, shape=(1,)).load(start + element, VECTOR, alignment=16))

    @cute.jit
    def _store(
        self, target: RowMatrix, row: Int64, step: cutlass.Constexpr, values: Vector, k: Int32
    ) -> None:
        element = self._element(step)
        if element < k:
            start = row * target.stride + element
            Array(target.data, shape=(1,)).store(values, start, alignment=16)

    def _squares(self, values: Vector, step: int, k: Int32) -> Float32:
        """Sum of squares of this thread's vector in ``step``; 0 past the row's end."""
        squares = Float32(0.0)
        for n in range(VECTOR):
            squares = cute.math.fma(values[n], values[n], squares)
        return cutlass.select_(self._element(step) < k, squares, Float32(0.0))

    @cute.jit
    def _total(self, value: Float32) -> Float32:
        """Sum of ``value`` over the CTA's threads, bit-identical in each thread."""
        partial = Array(Float32, self.tile.warps, space=AddressSpace.smem, alignment=16)
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        value = _over_warp(value)
        if lane == 0:
            partial.store(value, warp)
        ptx.barrier_cta_sync()
        value = Float32(0.0)
        if lane < self.tile.warps:
            value = Float32(partial.load(lane))
        return _over_warp(value)


def _over_warp(value: Float32) -> Float32:
    """Sum of ``value`` over the warp by butterfly shuffles: both partners form the same sum."""
    distance = 1
    while distance < WARP:
        value = value + cute.arch.shuffle_sync_bfly(value, distance)
        distance *= 2
    return value


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
