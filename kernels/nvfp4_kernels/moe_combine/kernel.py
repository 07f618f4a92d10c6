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
from nvfp4_kernels.compile import launch
from nvfp4_kernels.device.arguments import example, without_unread
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import dtype_name
from nvfp4_kernels.moe_combine.choose import (
    SLOTS_IN_FLIGHT,
    VECTOR_BYTES,
    CombineTile,
    choose_config,
)

QUAD = 4  # numbers of 4 bytes that a thread loads at once


class CombineArguments(NamedTuple):
    """Arguments of a launch.

    Attributes:
        y: rows [tiles · T, h].
        rows: int32 [m, k], -1 for a slot without a row.
        weights: float32 [m, k], or null.
        out: [m, h].
        m, h: sizes.
    """

    y: cute.Pointer
    rows: cute.Pointer
    weights: cute.Pointer
    out: cute.Pointer
    m: Int32
    h: Int32


@dataclass(frozen=True)
class MoeCombine:
    """Sum of each token's slots: a thread adds up 16 bytes of up to ``top_k`` rows.

    All threads have the same role. Of up to ``SLOTS_IN_FLIGHT`` slots a thread loads everything
    before it adds the first.

    Attributes:
        dtype: of the rows, e.g. ``"bfloat16"``.
        out_dtype: of the result.
        top_k: slots of a token.
        weighted: whether slots have weights.
        tile: threads.
    """

    dtype: str
    out_dtype: str
    top_k: int
    weighted: bool
    tile: CombineTile

    @property
    def width(self) -> int:
        """Elements that a thread adds up."""
        return 8 * VECTOR_BYTES // TYPES[self.dtype].width

    def signature(self) -> tuple[CombineArguments]:
        """Example of ``__call__``'s arguments."""
        types = {"y": TYPES[self.dtype], "out": TYPES[self.out_dtype]}
        types |= {"rows": Int32, "weights": Float32}
        return (example(CombineArguments, types),)

    @cute.jit
    def __call__(self, arguments: CombineArguments, stream: cuda_driver.CUstream) -> None:
        """Launch CTAs over tokens and parts of a row."""
        parts = cute.ceil_div(arguments.h, self.tile.threads * self.width)
        self.kernel(without_unread(arguments, ["m"])).launch(
            grid=(arguments.m, parts, 1),
            block=(self.tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: CombineArguments) -> None:
        """Add up this thread's part of one token's slots."""
        token, part, _ = cute.arch.block_idx()
        element = (part * self.tile.threads + cute.arch.thread_idx()[0]) * self.width
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        first = Int64(token) * self.top_k
        rows = self._of_token(arguments.rows, first)
        weights = self._of_token(arguments.weights, first) if self.weighted else None
        total = self._sum(arguments, element, rows, weights)
        if element < arguments.h:
            Array(arguments.out, shape=(1,)).store(
                total.to(TYPES[self.out_dtype]),
                Int64(token) * arguments.h + element,
                alignment=min(VECTOR_BYTES, self.width * TYPES[self.out_dtype].width // 8),
            )

    def _of_token(self, source: cute.Pointer, first: Int64) -> list[Int32] | list[Float32]:
        """Numbers of a token's slots."""
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
        inside = element < arguments.h
        total = Vector.from_elements((0.0,) * self.width, Float32)
        for first in cutlass.range_constexpr(0, self.top_k, SLOTS_IN_FLIGHT):
            slots = range(first, min(self.top_k, first + SLOTS_IN_FLIGHT))
            there_is = [inside & (rows[slot] >= 0) for slot in slots]
            values = [
                _load(arguments.y, Int64(rows[slot]) * arguments.h + element, has)
                for slot, has in zip(slots, there_is, strict=True)
            ]
            for n in cutlass.range_constexpr(len(values)):
                # Branched around, so that a slot of another rank costs no arithmetic.
                if there_is[n]:
                    weight = None if weights is None else weights[first + n]
                    total = _add(total, values[n].to(Float32), weight)
        return total


def _load(source: cute.Pointer, index: Int64, there_is: Boolean) -> Vector:
    """16 bytes from an element on; if there are none, zeros."""
    # Predicated rather than branched around, so that a thread's loads all start before it waits.
    words = ptx.inline_ptx(
        " ".join(f"mov.b32 {{$w{n}}}, 0;" for n in range(4))
        + " @{$r1} ld.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[Array(source, shape=(1,)).data_ptr(index), there_is],
    )
    return Vector.from_elements(tuple(words), Uint32).bitcast(source.dtype)


def _add(total: Vector, values: Vector, weight: Float32 | None) -> Vector:
    """``total + values · weight``: the product is rounded, then the sum.

    What is not written with a rounding may be fused.
    """
    sums = []
    for n in range(total.numel()):
        term = values[n] if weight is None else _rounded("mul", values[n], weight)
        sums.append(_rounded("add", total[n], term))
    return Vector.from_elements(tuple(sums), Float32)


def _rounded(operation: str, a: Float32, b: Float32) -> Float32:
    return ptx.inline_ptx(
        f"{operation}.rn.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Float32],
        read_only_args=[a, b],
    )


def moe_combine(
    y: Tensor, rows: Tensor, topk_weights: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See ``nvfp4_kernels.moe_combine.op.moe_combine``.

    Raises:
        InvalidArgument: a tensor that is not contiguous or misaligned, or an unsupported H.
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
        tile = choose_config(h, y.element_size())
        dtypes = dtype_name(y.dtype), dtype_name(out_dtype)
        kernel = MoeCombine(*dtypes, top_k, topk_weights is not None, tile)
        launch(kernel, CombineArguments(y, rows, topk_weights, out, m, h))
    return out
