"""``add_rms_norm`` for sm_90: a CTA for each row, which stays in registers between the passes."""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Float32, Int32, Int64, Vector
from cutlass.cute.runtime import make_ptr
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.add_rms_norm.choose import choose_config
from nvfp4_kernels.add_rms_norm.tile import VECTOR, WARP, NormTile
from nvfp4_kernels.checks import InvalidArgument, check_layout, check_rows
from nvfp4_kernels.compile import launch
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import dtype_name


@dataclass(frozen=True)
class Rows:
    """[row, K] in global memory; ``stride`` counts elements from one row to the next."""

    data: cute.Pointer
    stride: Int64


@dataclass(frozen=True)
class AddRmsNormSm90:
    """One configuration.

    Attributes:
        dtype: of all tensors, ``"bfloat16"`` or ``"float16"``.
        tile: threads and steps; covers a row.
    """

    dtype: str
    tile: NormTile

    def signature(self) -> tuple[Any, ...]:
        """Arguments of ``__call__``, see there."""
        gmem = cute.AddressSpace.gmem
        pointers = [make_ptr(TYPES[self.dtype], 16, gmem, assumed_align=16) for _ in range(5)]
        return (*pointers, Int32(0), Int32(0), Int64(0), Int64(0), Float32(0.0))

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        residual: cute.Pointer,
        weight: cute.Pointer,
        out: cute.Pointer,
        residual_out: cute.Pointer,
        m: Int32,
        k: Int32,
        x_stride: Int64,
        residual_stride: Int64,
        eps: Float32,
        stream: cuda_driver.CUstream,
    ) -> None:
        """``m`` rows of ``k`` elements; results lie without gaps."""
        pitch = Int64(k)
        inputs, results = (x, x_stride, residual, residual_stride), (out, residual_out)
        rows = [Rows(*inputs[:2]), Rows(*inputs[2:]), *(Rows(each, pitch) for each in results)]
        self.kernel(*rows, weight, k, eps).launch(
            grid=(m, 1, 1), block=(self.tile.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        x: Rows,
        residual: Rows,
        out: Rows,
        residual_out: Rows,
        weight: cute.Pointer,
        k: Int32,
        eps: Float32,
    ) -> None:
        """The weight first, which no kernel before this one writes."""
        steps, dtype = range(self.tile.steps), TYPES[self.dtype]
        # At once: the next kernel fetches its weights while the one before this one ends.
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        row = Int64(cute.arch.block_idx()[0])
        factors = [self._load(weight, Int64(0), step, k) for step in steps]
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        pairs = [
            [self._load(each.data, row * each.stride, step, k) for each in (x, residual)]
            for step in steps
        ]
        sums = [own.to(Float32) + before.to(Float32) for own, before in pairs]
        squares = Float32(0.0)
        for step in steps:
            self._store(residual_out, row, step, sums[step].to(dtype), k)
            squares = squares + self._squares(sums[step], step, k)
        inverse = 1.0 / cute.math.sqrt(self._total(squares) / k.to(Float32) + eps)
        for step in steps:
            self._store(out, row, step, (sums[step] * inverse).to(dtype) * factors[step], k)

    def _element(self, step: int) -> Int32:
        """Where this thread's elements of a step begin in the row."""
        return (step * self.tile.threads + cute.arch.thread_idx()[0]) * VECTOR

    def _load(self, source: cute.Pointer, start: Int64, step: int, k: Int32) -> Vector:
        # Beyond the row the last ones again, rather than a branch that loads would wait behind.
        element = cutlass.min(self._element(step), k - VECTOR)
        return Vector(Array(source, shape=(1,)).load(start + element, VECTOR, alignment=16))

    @cute.jit
    def _store(
        self, target: Rows, row: Int64, step: cutlass.Constexpr, values: Vector, k: Int32
    ) -> None:
        element = self._element(step)
        if element < k:
            start = row * target.stride + element
            Array(target.data, shape=(1,)).store(values, start, alignment=16)

    def _squares(self, values: Vector, step: int, k: Int32) -> Float32:
        """Of the elements that the row has."""
        squares = Float32(0.0)
        for n in range(VECTOR):
            squares = cute.math.fma(values[n], values[n], squares)
        return cutlass.select_(self._element(step) < k, squares, Float32(0.0))

    @cute.jit
    def _total(self, value: Float32) -> Float32:
        """Over the CTA's threads, the same bits in each."""
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
    """Butterfly: both partners of an exchange form the same sum."""
    distance = 1
    while distance < WARP:
        value = value + cute.arch.shuffle_sync_bfly(value, distance)
        distance *= 2
    return value


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.add_rms_norm.op.add_rms_norm``.

    Raises:
        InvalidArgument: a K that is too long or no multiple of 8, or rows that do not lie as the
            kernel reads them.
    """
    m, k = x.shape
    if k % VECTOR:
        raise InvalidArgument(
            f"x: K is {k}, must be a multiple of {VECTOR} on sm_90; normalise such rows with torch"
        )
    for name, rows in (("x", x), ("residual", residual)):
        if rows.stride(1) != 1:
            raise InvalidArgument(
                f"{name}: strides are {rows.stride()}, the last must be 1; call contiguous() on it"
            )
    check_rows("sm_90", x=x, residual=residual)
    check_layout("weight", weight)
    out, residual_out = x.new_empty(x.shape), x.new_empty(x.shape)
    if m:
        kernel = AddRmsNormSm90(dtype_name(x.dtype), choose_config(k))
        strides = x.stride(0), residual.stride(0)
        launch(kernel, x, residual, weight, out, residual_out, m, k, *strides, eps)
    return out, residual_out
