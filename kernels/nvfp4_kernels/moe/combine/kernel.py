"""The kernel of ``moe_combine`` on sm_90 and sm_100, and its launch."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Array, Boolean, Float32, Int32, Int64, Uint32, Vector
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_layout
from nvfp4_kernels.device.arguments import example, without_unread
from nvfp4_kernels.device.math import rounded
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.device.widen import widen
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.moe.combine.choose import (
    VECTOR_BYTES,
    VECTORS_IN_FLIGHT,
    CombineTile,
    choose_config,
)
from nvfp4_kernels.runtime.compile import launch

QUAD = 4  # numbers of 4 bytes that a thread loads at once


class CombineArguments(NamedTuple):
    """Arguments of a launch.

    Attributes:
        y: rows [tiles · T, h].
        rows: int32 [m, k], row in ``y`` of each slot, -1 for a slot without a row.
        weights: float32 [m, k], or null.
        out: [m, h].
        m, h: number of tokens, and of elements per row.
    """

    y: cute.Pointer
    rows: cute.Pointer
    weights: cute.Pointer
    out: cute.Pointer
    m: Int32
    h: Int32


@dataclass(frozen=True)
class MoeCombine:
    """Weighted sum over each token's slots: a thread sums some columns of up to ``top_k`` rows.

    All threads have the same role. A thread issues the loads of as many slots as
    ``VECTORS_IN_FLIGHT`` allows before the first addition.

    Attributes:
        dtype: dtype of the rows, e.g. ``"bfloat16"``.
        out_dtype: dtype of the result.
        top_k: slots per token.
        weighted: whether slots have weights.
        tile: threads per CTA, and vectors per thread.
    """

    dtype: str
    out_dtype: str
    top_k: int
    weighted: bool
    tile: CombineTile

    @property
    def width(self) -> int:
        """Number of elements per 16-byte vector."""
        return 8 * VECTOR_BYTES // TYPES[self.dtype].width

    @property
    def part(self) -> int:
        """Number of columns that a CTA sums."""
        return self.tile.threads * self.tile.steps * self.width

    def signature(self) -> tuple[CombineArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        types = {"y": TYPES[self.dtype], "out": TYPES[self.out_dtype]}
        types |= {"rows": Int32, "weights": Float32}
        return (example(CombineArguments, types),)

    @cute.jit
    def __call__(self, arguments: CombineArguments, stream: cuda_driver.CUstream) -> None:
        """Launch a CTA for each token and part of the columns."""
        parts = cute.ceil_div(arguments.h, self.part)
        self.kernel(without_unread(arguments, ["m"])).launch(
            grid=(arguments.m, parts, 1),
            block=(self.tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: CombineArguments) -> None:
        """Sum this thread's columns over the slots of one token."""
        token, part, _ = cute.arch.block_idx()
        element = part * self.part + cute.arch.thread_idx()[0] * self.width
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        first = Int64(token) * self.top_k
        rows = self._of_token(arguments.rows, first)
        weights = self._of_token(arguments.weights, first) if self.weighted else None
        total = self._sum(arguments, element, rows, weights)
        out = Array(arguments.out, shape=(1,)).subview(Int64(token) * arguments.h + element)
        alignment = min(VECTOR_BYTES, self.width * TYPES[self.out_dtype].width // 8)
        for step in cutlass.range_constexpr(self.tile.steps):
            sums = [total[step * self.width + n] for n in range(self.width)]
            result = Vector.from_elements(tuple(sums), Float32).to(TYPES[self.out_dtype])
            if self._has(arguments, element, step):
                out.store(result, step * self._stride, alignment=alignment)

    @property
    def _stride(self) -> int:
        """Stride between a thread's steps, in elements."""
        return self.tile.threads * self.width

    def _has(self, arguments: CombineArguments, element: Int32, step: int) -> Boolean:
        """Whether this thread's vector in ``step`` lies in the row."""
        if not self.tile.ragged:
            return Boolean(True)
        return element + step * self._stride < arguments.h

    def _of_token(self, source: cute.Pointer, first: Int64) -> list[Int32] | list[Float32]:
        """Load the row indices or the routing weights of a token's slots."""
        numbers = Array(source, shape=(1,))
        if self.top_k % QUAD:
            return [numbers.load(first + slot) for slot in range(self.top_k)]
        quads = [
            numbers.load(first + slot, QUAD, alignment=VECTOR_BYTES)
            for slot in range(0, self.top_k, QUAD)
        ]
        return [quads[slot // QUAD][slot % QUAD] for slot in range(self.top_k)]

    @cute.jit
    def _sum(
        self,
        arguments: CombineArguments,
        element: Int32,
        rows: list[Int32],
        weights: list[Float32] | None,
    ) -> Vector:
        steps = self.tile.steps
        inside = [self._has(arguments, element, step) for step in range(steps)]
        element_bytes = arguments.y.dtype.width // 8
        first_row = Array(arguments.y, shape=(1,)).data_ptr(Int64(element))
        total = Vector.from_elements((0.0,) * (self.width * steps), Float32)
        at_once = max(1, VECTORS_IN_FLIGHT // steps)
        for first in cutlass.range_constexpr(0, self.top_k, at_once):
            slots = range(first, min(self.top_k, first + at_once))
            words = [
                _load(
                    first_row,
                    rows[slot],
                    arguments.h * element_bytes,
                    [has & (rows[slot] >= 0) for has in inside],
                    self._stride * element_bytes,
                )
                for slot in slots
            ]
            for n in cutlass.range_constexpr(len(words)):
                # Branched around, so that a slot of another rank costs no arithmetic.
                if rows[first + n] >= 0:
                    weight = None if weights is None else weights[first + n]
                    total = _add(total, widen(words[n].bitcast(arguments.y.dtype)), weight)
        return total


def _load(
    first_row: cute.Pointer, row: Int32, pitch: Int32, there_is: list[Boolean], stride: int
) -> Vector:
    """Load vectors of a row, ``stride`` bytes apart, as 32-bit words; zeros for absent vectors.

    Args:
        first_row: address of this thread's first vector in row 0.
        row: index of the row to load.
        pitch: bytes per row.
        there_is: whether each vector exists.
        stride: bytes between vectors.
    """
    # Predicated rather than branched around, so that a thread's loads all start before it waits.
    count = len(there_is)
    loads = [
        " ".join(f"mov.b32 {{$w{4 * n + word}}}, 0;" for word in range(4))
        + f" @{{$r{3 + n}}} ld.global.L1::no_allocate.v4.b32"
        + f" {{{{$w{4 * n}}}, {{$w{4 * n + 1}}}, {{$w{4 * n + 2}}}, {{$w{4 * n + 3}}}}},"
        + f" [vector+{n * stride}];"
        for n in range(count)
    ]
    words = ptx.inline_ptx(
        "{ .reg .b64 vector; mad.wide.s32 vector, {$r1}, {$r2}, {$r0}; " + " ".join(loads) + " }",
        write_only_types=[Uint32] * (4 * count),
        read_only_args=[first_row, row, pitch, *there_is],
    )
    return Vector.from_elements(tuple(words), Uint32)


def _add(total: Vector, values: Vector, weight: Float32 | None) -> Vector:
    """Return ``total + values · weight``: the product is rounded, then the sum.

    Without explicit rounding the compiler may contract both operations to an FMA.
    """
    sums = []
    for n in range(total.numel()):
        term = values[n] if weight is None else rounded("mul", values[n], weight)
        sums.append(rounded("add", total[n], term))
    return Vector.from_elements(tuple(sums), Float32)


def moe_combine(
    y: Tensor, rows: Tensor, topk_weights: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See ``nvfp4_kernels.moe.combine.op.moe_combine``.

    Raises:
        InvalidArgument: a tensor is misaligned or not contiguous, or a row is not whole vectors.
    """
    (m, top_k), h = rows.shape, y.shape[2]
    width = VECTOR_BYTES // y.element_size()
    if h % width:
        raise InvalidArgument(
            f"y: H is {h}, must be a multiple of {width}, 16 bytes; pad rows with zeros"
        )
    for name, x in (("y", y), ("rows", rows), ("topk_weights", topk_weights)):
        check_layout(name, x)
    out = y.new_empty((m, h), dtype=out_dtype)
    if out.numel():
        tile = choose_config(m, h, y.element_size(), device_facts(y.device).sms)
        dtypes = dtype_name(y.dtype), dtype_name(out_dtype)
        kernel = MoeCombine(*dtypes, top_k, topk_weights is not None, tile)
        launch(kernel, CombineArguments(y, rows, topk_weights, out, m, h))
    return out
