"""Rows in global memory, and slices of them."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Uint32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.topk.keys import nan_to_lowest
from nvfp4_kernels.indexer.topk.shared import ThreadGroup
from nvfp4_kernels.indexer.topk.tile import LINE, QUAD


@dataclass(frozen=True)
class RowSlice:
    """Row in global memory, and this CTA's slice of the row.

    A row consists of up to 3 elements, 16-byte aligned quads (4 elements each), and up to 3 more
    elements.

    Attributes:
        elements: elements of the row.
        length: number of elements of the row.
        head: number of elements before the row's first quad.
        quads: number of quads of the row.
        first: index of the slice's first quad.
        last: index of the first quad after the slice.
    """

    elements: Array
    length: Int32
    head: Int32
    quads: Int32
    first: Int32
    last: Int32

    @property
    def end(self) -> Int32:
        """Column after the row's last quad."""
        return self.head + QUAD * self.quads

    @property
    def origin(self) -> Int32:
        """Column of the bitmap's first bit, one quad before the slice: the head needs bits too."""
        return self.head + QUAD * (self.first - 1)


def row_slice(group: ThreadGroup, logits: cute.Pointer, start: Int64, length: Int32) -> RowSlice:
    """Slice of this CTA in the row of ``length`` elements of ``logits`` from ``start`` on.

    Slices consist of whole lines of 8 quads, but for the last quads of the row, and are in the
    order of ranks.
    """
    misaligned = ((logits.toint() >> 2) + start).to(Int32) % QUAD
    elements = Array(logits, shape=(1,)).subview(start)
    head = cutlass.min((QUAD - misaligned) % QUAD, length)
    quads = (length - head) // QUAD
    lines = cute.ceil_div(quads, group.tile.cluster * LINE)
    first = cutlass.min(group.rank * lines * LINE, quads)
    last = cutlass.min(first + lines * LINE, quads)
    return RowSlice(elements, length, head, quads, first, last)


def load_quad(row: RowSlice, quad: Int32, inside: Boolean | None = None) -> list[Float32]:
    """Load the 4 elements of a quad; if not ``inside``, return zeros and load nothing."""
    # Predicated rather than branched around, so that a thread's loads all start before it waits.
    names = ", ".join(f"{{$w{n}}}" for n in range(QUAD))
    load = f"ld.global.v4.b32 {{ {names} }}, [{{$r0}}];"
    arguments: list[object] = [_address(row, row.head + QUAD * quad)]
    if inside is not None:
        clear = " ".join(f"mov.b32 {{$w{n}}}, 0;" for n in range(QUAD))
        load = f"{clear} @{{$r1}} {load}"
        arguments.append(inside)
    words = ptx.inline_ptx(load, write_only_types=[Uint32] * QUAD, read_only_args=arguments)
    return [word.bitcast(Float32) for word in words]


def load_element(row: RowSlice, column: Int32) -> Float32:
    """Load one element, NaN as −inf."""
    return nan_to_lowest(row.elements[column])


def prefetch_quads(row: RowSlice, quad: Int32, count: Int32) -> None:
    """Prefetch ``count`` quads, at least one, from ``quad`` on to L2."""
    ptx.cp_async_bulk_prefetch(_address(row, row.head + QUAD * quad), count * (4 * QUAD))


def _address(row: RowSlice, column: Int32) -> Array:
    """Address of the element in ``column``."""
    return row.elements.data_ptr(column)
