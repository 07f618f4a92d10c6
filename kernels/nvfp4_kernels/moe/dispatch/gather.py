"""Sinks of a dispatch whose CTAs have a row, or a part of one: copies, and rows as E4M3."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32, Int64, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.row_vectors.fp8 import (
    OUTPUT_ALIGNMENT,
    OUTPUT_TYPES,
    Fp8Quantizer,
    Fp8Rows,
)
from nvfp4_kernels.device.row_vectors.place import Place, store
from nvfp4_kernels.device.row_vectors.tile import VECTOR, VectorTile
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.moe.dispatch.tokens import (
    TOKEN_ALIGNMENT,
    TOKEN_TYPES,
    DeviceSource,
    DispatchArguments,
    Tokens,
    first_element,
    load_slot,
    load_vector,
    load_weight,
    weigh,
)


@dataclass(frozen=True)
class RowVectors:
    """Tokens in rows of token tiles: layout, and a thread's reads; subclasses write.

    Attributes:
        dtype: ``"bfloat16"`` or ``"float16"``.
        tile: layout of a CTA's threads over a row, or over a part of one.
        top_k: slots (selected experts) per token; 0: rows are already in tiles.
        weighted: whether the slots' routing weights are applied to the tokens.
    """

    dtype: str
    tile: VectorTile
    top_k: int
    weighted: bool

    @property
    def whole_rows(self) -> bool:
        """Whether a work item is a whole row, whose threads exchange data."""
        return False

    def tokens(self) -> Tokens:
        """Example of the rows to read, for ``cute.compile``."""
        return example(Tokens, {"x": TYPES[self.dtype], **TOKEN_TYPES}, TOKEN_ALIGNMENT)

    def grid(self, source: DeviceSource, ctas: Int32) -> tuple[Int32 | int, ...]:
        """Extent of the grid."""
        return ctas, 1, 1

    def items_of_tile(self, tile_tokens: int, k: int) -> int:
        """Number of work items per token tile."""
        return tile_tokens * -(-k // self.tile.elements)

    def take_turns(
        self,
        source: DeviceSource,
        arguments: DispatchArguments,
        slots: Array,
        used: Callable[[], Int32],
    ) -> None:
        """Write the rows of ``used()`` tiles; a work item is a row or a part of a row.

        ``slots``: slots of all rows.
        """
        items = used() * source.tile_tokens * self._parts(arguments.out.k)
        self._run_items(arguments, slots, items, source.workers(arguments.ctas))

    def _parts(self, k: Int32) -> Int32:
        """Number of work items per row."""
        return Int32(1) if self.whole_rows else cute.ceil_div(k, self.tile.elements)

    @cute.jit
    def _run_items(
        self, arguments: DispatchArguments, slots: Array, items: Int32, workers: Int32
    ) -> None:
        for item in range(cute.arch.block_idx()[0], items, workers):
            place = self._place(arguments.out.k, item)
            self.write(place, self._vectors(arguments.tokens, slots, place), arguments.out)
            if cutlass.const_expr(self.whole_rows):
                ptx.barrier_cta_sync()  # shared memory is that of the next item, too

    def _place(self, k: Int32, item: Int32) -> Place:
        """``Place`` of this thread in a work item."""
        parts, first = self._parts(k), cute.arch.thread_idx()[0] * VECTOR
        if not self.whole_rows:
            first += item % parts * self.tile.elements
        return Place(self.tile, Int64(item // parts), first, k)

    def _vectors(self, tokens: Tokens, slots: Array, place: Place) -> list[Vector]:
        """Load this thread's vectors; zeros in padding, and past the row's end."""
        slot = load_slot(slots, place.row)
        start = first_element(slot, place.row, self.top_k, place.k)
        vectors = [
            load_vector(tokens.x, start + place.element(step), (slot >= 0) & place.has(step))
            for step in place.steps
        ]
        if not self.weighted:
            return vectors
        weight = load_weight(tokens.weights, slot)
        return [weigh(vector, weight) for vector in vectors]

    def write(self, place: Place, vectors: list[Vector], out: Any) -> None:
        """Write this thread's vectors of a work item; all threads of the CTA take part."""
        raise NotImplementedError


class CopiedRows(NamedTuple):
    """Output rows in global memory; part of a launch's arguments.

    Attributes:
        data: [tiles, T, k].
        k: elements per row.
    """

    data: cute.Pointer
    k: Int32


@dataclass(frozen=True)
class GatheredRows(RowVectors):
    """Copies of tokens in rows of token tiles."""

    def arguments(self, source: DeviceSource) -> CopiedRows:
        """Example of the output rows, for ``cute.compile``."""
        return example(CopiedRows, {"data": TYPES[self.dtype]})

    def write(self, place: Place, vectors: list[Vector], out: CopiedRows) -> None:
        """Store this thread's vectors of a work item."""
        for step, vector in enumerate(vectors):
            store(place, step, out.data, place.row * place.k, vector)


@dataclass(frozen=True)
class Fp8TokenRows(RowVectors):
    """Tokens as E4M3 in rows of token tiles, in the order of ``formats.fp8_rows``.

    Attributes:
        per_token: whether each row has its own scale.
    """

    per_token: bool

    @property
    def whole_rows(self) -> bool:
        """Whether a work item is a whole row, whose threads exchange data."""
        return self.per_token

    def arguments(self, source: DeviceSource) -> Fp8Rows:
        """Example of the output rows, for ``cute.compile``."""
        return example(Fp8Rows, OUTPUT_TYPES, OUTPUT_ALIGNMENT)

    def write(self, place: Place, vectors: list[Vector], out: Fp8Rows) -> None:
        """Quantise and store this thread's vectors of a work item."""
        Fp8Quantizer(out, self.per_token).write(place, vectors)
