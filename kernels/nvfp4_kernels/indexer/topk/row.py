"""Where the elements of a row are."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Uint32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.topk.keys import known
from nvfp4_kernels.indexer.topk.shared import Cta
from nvfp4_kernels.indexer.topk.tile import LINE, QUAD


@dataclass(frozen=True)
class Row:
    """A row, and this CTA's slice of it.

    A row is up to 3 elements, quads that lie on a multiple of 16 bytes, and up to 3 elements.

    Attributes:
        elements: of the row.
        length: elements of the row.
        head: elements before the first quad.
        quads: of the row.
        first: quad of the slice.
        last: the quad after the slice.
    """

    elements: Array
    length: Int32
    head: Int32
    quads: Int32
    first: Int32
    last: Int32

    @property
    def end(self) -> Int32:
        """The column after the last quad."""
        return self.head + QUAD * self.quads

    @property
    def origin(self) -> Int32:
        """A column before all of the slice's, the head among those of the first CTA."""
        return self.head + QUAD * (self.first - 1)


def find(cta: Cta, logits: cute.Pointer, start: Int64, length: Int32) -> Row:
    """A row that starts at element ``start``: slices are whole lines, in the order of ranks."""
    beyond = ((logits.toint() >> 2) + start).to(Int32) % QUAD
    elements = Array(logits, shape=(1,)).subview(start)
    head = cutlass.min((QUAD - beyond) % QUAD, length)
    quads = (length - head) // QUAD
    lines = cute.ceil_div(quads, cta.config.cluster * LINE)
    first = cutlass.min(cta.rank * lines * LINE, quads)
    last = cutlass.min(first + lines * LINE, quads)
    return Row(elements, length, head, quads, first, last)


def load_quad(row: Row, quad: Int32, inside: Boolean | None = None) -> list[Float32]:
    """Its 4 elements; anything if not ``inside``."""
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


def load_element(row: Row, column: Int32) -> Float32:
    """One of them, NaN as −inf."""
    return known(row.elements[column])


def prefetch_quads(row: Row, quad: Int32, count: Int32) -> None:
    """Has L2 fetch them; ``count`` is positive."""
    ptx.cp_async_bulk_prefetch(_address(row, row.head + QUAD * quad), count * (4 * QUAD))


def _address(row: Row, column: Int32) -> Array:
    return row.elements.data_ptr(column)
