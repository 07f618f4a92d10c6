"""Sink of a dispatch without quantisation: tokens are copied to rows of token tiles."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Int64, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.moe.dispatch.choose import VECTOR_BYTES, GatherTile
from nvfp4_kernels.moe.dispatch.tokens import (
    TOKEN_ALIGNMENT,
    TOKEN_TYPES,
    DeviceSource,
    DispatchArguments,
    Tokens,
    first_element,
    load_slot,
    load_weight,
    weigh,
)


class CopiedRows(NamedTuple):
    """Output rows in global memory; part of a launch's arguments.

    Attributes:
        data: [tiles, T, k].
        k: elements per row.
    """

    data: cute.Pointer
    k: Int32


@dataclass(frozen=True)
class GatheredRows:
    """Copies of tokens in rows of token tiles: layout, and a thread's reads and writes.

    Attributes:
        dtype: ``"bfloat16"`` or ``"float16"``.
        tile: threads per CTA, and vectors per thread.
        top_k: slots (selected experts) per token.
        weighted: whether the slots' routing weights are applied to the tokens.
    """

    dtype: str
    tile: GatherTile
    top_k: int
    weighted: bool

    def arguments(self, source: DeviceSource) -> CopiedRows:
        """Example of the output rows, for ``cute.compile``."""
        return example(CopiedRows, {"data": TYPES[self.dtype]})

    def tokens(self) -> Tokens:
        """Example of the rows to read, for ``cute.compile``."""
        return example(Tokens, {"x": TYPES[self.dtype], **TOKEN_TYPES}, TOKEN_ALIGNMENT)

    def grid(self, source: DeviceSource, ctas: Int32) -> tuple[Int32 | int, ...]:
        """Extent of the grid."""
        return ctas, 1, 1

    @property
    def width(self) -> int:
        """Number of elements per 16-byte load or store."""
        return 8 * VECTOR_BYTES // TYPES[self.dtype].width

    @property
    def part(self) -> int:
        """Number of elements of a row per work item."""
        return self.tile.threads * self.tile.steps * self.width

    def take_turns(
        self,
        source: DeviceSource,
        arguments: DispatchArguments,
        slots: Array,
        used: Callable[[], Int32],
    ) -> None:
        """Copy the rows of ``used()`` tiles; a work item is a row or a part of a row.

        ``slots``: slots of all rows.
        """
        items = used() * source.tile_tokens * cute.ceil_div(arguments.out.k, self.part)
        self._run_items(arguments, slots, items, source.workers(arguments.ctas))

    @cute.jit
    def _run_items(
        self, arguments: DispatchArguments, slots: Array, items: Int32, workers: Int32
    ) -> None:
        for item in range(cute.arch.block_idx()[0], items, workers):
            self._copy(arguments.tokens, slots, arguments.out, item)

    @cute.jit
    def _copy(self, tokens: Tokens, slots: Array, out: CopiedRows, item: Int32) -> None:
        """Copy this thread's vectors of a work item; ``slots``: slots of all rows."""
        k = out.k
        parts = cute.ceil_div(k, self.part)
        row, part = Int64(item // parts), item % parts
        slot = load_slot(slots, row)
        start = first_element(slot, row, self.top_k, k)
        elements = [
            part * self.part + (step * self.tile.threads + cute.arch.thread_idx()[0]) * self.width
            for step in range(self.tile.steps)
        ]
        vectors = [_load(tokens.x, start + at, (slot >= 0) & (at < k)) for at in elements]
        if cutlass.const_expr(self.weighted):
            weight = load_weight(tokens.weights, slot)
            vectors = [weigh(vector, weight) for vector in vectors]
        target = Array(out.data, shape=(1,)).subview(row * k)
        for step in cutlass.range_constexpr(self.tile.steps):
            if elements[step] < k:
                target.store(vectors[step], elements[step], alignment=VECTOR_BYTES)


def _load(source: cute.Pointer, index: Int64, there_is: Boolean) -> Vector:
    """Load 16 bytes from element ``index`` on; return zeros if not ``there_is``."""
    words = ptx.inline_ptx(
        " ".join(f"mov.b32 {{$w{n}}}, 0;" for n in range(4))
        + " @{$r1} ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[Array(source, shape=(1,)).data_ptr(index), there_is],
    )
    return Vector.from_elements(tuple(words), Uint32).bitcast(source.dtype)
