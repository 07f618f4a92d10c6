"""Coordinates of a thread's blocks, and loads and stores of the blocks."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Int64, Uint8, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.nvfp4_block import Block
from nvfp4_kernels.device.rowwise.tile import (
    ATOM_BLOCKS,
    ATOM_ROWS,
    BLOCK,
    LOADED_WORDS,
    WARP,
    RowTile,
)
from nvfp4_kernels.formats.terms import TermLayout

ATOM_BYTES = ATOM_ROWS * ATOM_BLOCKS
ATOM_LINES = 32  # of an atom, each with the scales of rows 32 apart
LINE_BYTES = ATOM_BYTES // ATOM_LINES


@dataclass(frozen=True)
class Place:
    """Coordinates of a thread's blocks: block ``first + step · tile.stride`` in each step.

    Attributes:
        tile: tile of the CTA.
        terms: layout of the output operand's terms.
        m: rows per matrix.
        batch: index of the row's matrix.
        term_bytes: bytes between the scales of consecutive terms.
        inside: whether the row exists; otherwise the row is padding and has only scales.
        live: whether the CTA has any row that is not padding.
        row: index of the thread's row among the rows of all matrices.
        first: index of the thread's first block in the row.
        first_of_cta: index of the CTA's first block in the row.
        blocks: blocks per row.
        slot: the row's index among the CTA's slots.
        first_slot: index of the CTA's first slot among the slots of an atom.
        lane: index of the thread among the threads of its warp that share the row.
        warp: index of the warp in the CTA.
        scales: offset of the CTA's first scale in the output, in bytes.
        line_rows: rows per matrix if the CTA writes whole lines of its atoms, else 0.
    """

    tile: RowTile
    terms: TermLayout
    m: Int32
    batch: Int32
    term_bytes: Int64
    inside: Boolean
    live: Boolean
    row: Int64
    first: Int32
    first_of_cta: Int32
    blocks: Int32 | int
    slot: Int32
    first_slot: Int32
    lane: Int32
    warp: Int32
    scales: Int64
    line_rows: int = 0

    @property
    def steps(self) -> range:
        return range(self.tile.steps)

    def block(self, step: int) -> Int32:
        """Index in the row of this thread's block in ``step``; may lie past the last block."""
        return self.first + step * self.tile.stride

    def element(self, step: int) -> Int64:
        """Index in the row of the first element of this thread's block in ``step``."""
        return Int64(self.first) * BLOCK + step * self.tile.stride * BLOCK

    def term_row(self, term: int) -> Int64:
        """Index of this thread's row in term ``term``, among rows of all terms and matrices."""
        return self.row + (Int64(self.batch) * (self.terms.count - 1) + term) * self.m

    def pads(self, slot: Int32) -> Boolean:
        """Whether a slot is padding of the one scale atom that holds the scales of all terms."""
        of_atom = self.first_slot + slot
        return (of_atom // 4 >= self.m) | (of_atom % 4 >= self.terms.count)

    def has(self, step: int) -> Boolean:
        """Whether this thread has a block to read and write in ``step``."""
        return self.inside & (self.block(step) < _unknown(self.blocks))


def steps_ahead(element: type[cutlass.Numeric], inputs: int) -> int:
    """Number of steps whose blocks, ``inputs`` per step, a thread loads before using the first."""
    return max(1, LOADED_WORDS // (inputs * BLOCK * element.width // 32))


def ctas(tile: RowTile, m: Int32, k: Int32, batch: Int32) -> Int32:
    """Number of CTAs that cover all rows, rows of padding scales included."""
    columns = cute.ceil_div(k, tile.blocks * BLOCK)
    return columns * cute.ceil_div(m, ATOM_ROWS) * tile.groups * batch


def find(tile: RowTile, m: Int32, k: Int32, terms: TermLayout) -> Place:
    """``Place`` of this thread; CTAs with neighbouring indices have parts of the same rows."""
    cta, columns = cute.arch.block_idx()[0], cute.ceil_div(k, tile.blocks * BLOCK)
    return find_at(tile, m, k, terms, cta % columns, cta // columns)


def find_at(
    tile: RowTile,
    m: Int32 | int,
    k: Int32 | int,
    terms: TermLayout,
    column: Int32,
    group: Int32,
    thread: Int32 | None = None,
) -> Place:
    """``Place`` of a thread in the CTA that processes part ``column`` of row group ``group``.

    ``thread``: index among the tile's threads; None: this thread's index in the CTA.
    """
    thread = cute.arch.thread_idx()[0] if thread is None else thread
    warp, in_warp = thread // WARP, thread % WARP
    slot, lane = in_warp // tile.lanes, in_warp % tile.lanes
    atom_row, group = group // tile.groups, group % tile.groups
    down = cute.ceil_div(m, ATOM_ROWS)
    batch, above = atom_row // down, atom_row % down * ATOM_ROWS
    row = above + _row(group * tile.slots + slot)
    first_of_cta = column * tile.blocks
    across = _atoms_across(k // BLOCK)
    # Terms that do not share atoms lie one after the other, in each matrix.
    if not terms.packed:
        atom_row += batch * (down * (terms.count - 1))
    atoms = Int64(atom_row) * across + first_of_cta // ATOM_BLOCKS
    return Place(
        tile=tile,
        terms=terms,
        m=m,
        batch=batch,
        term_bytes=Int64(down) * across * ATOM_BYTES,
        inside=row < _unknown(m),
        live=above + _row(group * tile.slots) < m,
        row=Int64(batch) * m + row,
        first=first_of_cta + warp * tile.lanes + lane,
        first_of_cta=first_of_cta,
        blocks=k // BLOCK,
        slot=slot,
        first_slot=group * tile.slots,
        lane=lane,
        warp=warp,
        scales=atoms * ATOM_BYTES + group * (tile.slots * ATOM_BLOCKS),
    )


def find_in_lines(
    tile: RowTile,
    rows: int,
    k: Int32 | int,
    terms: TermLayout,
    column: Int32,
    group: Int32,
    thread: Int32 | None = None,
) -> Place:
    """``Place`` of a thread if matrices have at most 32 rows: one 16-byte line per row and atom.

    The line of a row (0 to 31) begins with the row's four scales; the scales of further terms, or
    the padding of rows 32 to 127, fill the rest. CTAs take neighbouring rows; for each row a CTA
    writes the row's line and, as zeros, every ``rows``-th line after that. Thus no CTA has only
    padding.
    ``thread``: see ``find_at``.
    """
    assert rows <= ATOM_LINES
    assert rows % tile.slots == 0
    thread = cute.arch.thread_idx()[0] if thread is None else thread
    warp, in_warp = thread // WARP, thread % WARP
    slot, lane = in_warp // tile.lanes, in_warp % tile.lanes
    groups = rows // tile.slots
    batch, group = group // groups, group % groups
    first_slot, first_of_cta = group * tile.slots, column * tile.blocks
    atoms = Int64(batch) * _atoms_across(k // BLOCK) + first_of_cta // ATOM_BLOCKS
    return Place(
        tile=tile,
        terms=terms,
        m=Int32(rows),
        batch=batch,
        term_bytes=Int64(0),
        inside=Boolean(True),
        live=Boolean(True),
        row=Int64(batch) * rows + first_slot + slot,
        first=first_of_cta + warp * tile.lanes + lane,
        first_of_cta=first_of_cta,
        blocks=k // BLOCK,
        slot=slot,
        first_slot=first_slot,
        lane=lane,
        warp=warp,
        scales=atoms * ATOM_BYTES + first_slot * LINE_BYTES,
        line_rows=rows,
    )


def _atoms_across(blocks: Int32 | int) -> Int32 | int:
    return cute.ceil_div(blocks, ATOM_BLOCKS)


def _unknown(number: Int32 | int) -> Int32:
    """Opaque copy of ``number``, whose value the compiler cannot know.

    Otherwise the compiler folds the predicates of some loads to constants, which is invalid PTX.
    """
    if not isinstance(number, int):
        return number
    return ptx.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(number)]
    )


def _row(slot: Int32) -> Int32:
    """Row of a scale atom that is stored in slot ``slot``; ascends over the slots of a warp."""
    return slot % 4 * 32 + slot // 4


def load_block(
    source: cute.Pointer, index: Int64, inside: Boolean, streamed: bool = True
) -> Vector:
    """Load 16 elements at ``index``; zeros if not ``inside``.

    ``streamed``: whether L1 need not keep the elements, as no other thread reads them.
    """
    element = source.dtype
    hint = ".L1::no_allocate" if streamed else ""
    # Predicated rather than branched around, so that a thread's loads all start before it waits.
    clear = " ".join(f"mov.b32 {{$w{n}}}, 0;" for n in range(8))
    names = ", ".join(f"{{$w{n}}}" for n in range(8))
    load = f"{clear} @{{$r1}} ld.global{hint}.v8.b32 {{ {names} }}, [{{$r0}}];"
    words: list[Uint32] = []
    for part in range(element.width // 16):
        address = Array(source, shape=(1,)).data_ptr(index + part * (256 // element.width))
        words += ptx.inline_ptx(
            load,
            write_only_types=[Uint32] * 8,
            read_only_args=[address, inside],
        )
    return Vector.from_elements(tuple(words), Uint32).bitcast(element)


def prefetch_block(source: cute.Pointer, index: Int64, inside: Boolean) -> None:
    """Prefetch 16 elements at ``index`` to L2 if ``inside``; for memory that no kernel writes."""
    address = Array(source, shape=(1,)).data_ptr(index)
    ptx.inline_ptx("@{$r1} prefetch.global.L2 [{$r0}];", read_only_args=[address, inside])


@cute.jit
def store_block(
    place: Place,
    step: cutlass.Constexpr,
    term: cutlass.Constexpr,
    block: Block,
    data: cute.Pointer,
    scales: cute.Pointer,
) -> None:
    """Store a block's codes if the row exists, and the block's scale, which is zero in padding.

    Places of ``find_in_lines`` leave the scale to ``store_lines``.
    """
    tile = place.tile
    if place.has(step):
        codes = Array(data, shape=(1,))
        offset = place.term_row(term) * (place.blocks * (BLOCK // 2)) + place.element(step) // 2
        codes.store(block.codes.bitcast(Uint8), offset, alignment=8)
    stored = place.block(step) < _atoms_across(place.blocks) * ATOM_BLOCKS
    if cutlass.const_expr(place.line_rows > 0):
        stored = Boolean(False)  # store_lines() does so, of several blocks at once
    elif cutlass.const_expr(place.terms.packed):
        # Padding is written with the first term. Where there is a row, its slot is the first
        # term's.
        stored = stored & (place.inside | place.pads(place.slot) if term == 0 else place.inside)
    if stored:
        offset = place.scales + place.slot * ATOM_BLOCKS + place.lane % ATOM_BLOCKS
        offset += (place.first - place.first_of_cta) // ATOM_BLOCKS * ATOM_BYTES
        offset += step * tile.stride // ATOM_BLOCKS * ATOM_BYTES
        offset += term * (ATOM_BLOCKS if place.terms.packed else place.term_bytes)
        Array(scales, shape=(1,)).store(block.scale, offset)


@cute.jit
def store_lines(place: Place, blocks: list[list[Block]], scales: cute.Pointer) -> None:
    """Store whole lines of atoms: a row's scales, one word per term, then zeros.

    The four threads that have the blocks of one line exchange scales; each then writes lines of its
    own: the row's line, padding lines, or lines of other steps.

    Args:
        place: result of ``find_in_lines``.
        blocks: quantised blocks, per step and term.
        scales: output scales in global memory.
    """
    in_atom = place.lane % ATOM_BLOCKS
    words = [[_gathered(block.scale, in_atom) for block in of_step] for of_step in blocks]
    lines = ATOM_LINES // place.line_rows  # lines of an atom written by a row's threads
    across = min(ATOM_BLOCKS, max(1, ATOM_BLOCKS // lines))  # steps that they write at once
    steps = max(1, lines // ATOM_BLOCKS)
    first_atom = (place.first - place.first_of_cta) // ATOM_BLOCKS
    for first in cutlass.range_constexpr(0, place.tile.steps, across):
        for step in cutlass.range_constexpr(steps):
            of_lane = in_atom // (ATOM_BLOCKS // across)
            line = in_atom % (ATOM_BLOCKS // across) + step * ATOM_BLOCKS
            step = first + of_lane
            value = _line(words[first : first + across], of_lane, line == 0)
            block = place.first + step * place.tile.stride
            is_atom = block < _atoms_across(place.blocks) * ATOM_BLOCKS
            if is_atom & (step < place.tile.steps):
                offset = place.scales + (place.slot + line * place.line_rows) * LINE_BYTES
                offset += (first_atom + step * (place.tile.stride // ATOM_BLOCKS)) * ATOM_BYTES
                Array(scales, shape=(1,)).store(value, offset, alignment=LINE_BYTES)


def _line(words: list[list[Uint32]], step: Int32, is_row: Boolean) -> Vector:
    """Scale line of ``step``, 16 bytes: a word per term, then zeros, or zeros unless ``is_row``."""
    line = [Uint32(0)] * ATOM_BLOCKS
    for number, of_step in enumerate(words):
        chosen = is_row & (step == number)
        for term, word in enumerate(of_step):
            line[term] = Uint32(cutlass.select_(chosen, word, line[term]))
    return Vector.from_elements(tuple(line), Uint32).bitcast(Uint8)


def _gathered(scale: Uint8, in_atom: Int32) -> Uint32:
    """Pack the scales of four neighbouring threads into a word, returned to all four."""
    word = scale.to(Uint32) << (8 * in_atom).to(Uint32)
    for mask in (1, 2):
        word = word | cute.arch.shuffle_sync_bfly(word, mask)
    return word


@cute.jit
def store_elements(
    place: Place, step: cutlass.Constexpr, elements: Vector, target: cute.Pointer
) -> None:
    """Store 16 elements to ``target``, rows that are contiguous and shaped as the input."""
    if place.has(step):
        offset = place.row * (place.blocks * BLOCK) + place.element(step)
        Array(target, shape=(1,)).store(elements, offset, alignment=32)


@cute.jit
def store_padding(place: Place, scales: cute.Pointer) -> None:
    """Store the zero scales of a CTA whose rows are all padding."""
    tile = place.tile
    thread = place.warp * WARP + place.slot * tile.lanes + place.lane
    left = _atoms_across(place.blocks) - place.first_of_cta // ATOM_BLOCKS
    zeros = Vector.from_elements((0,) * ATOM_BLOCKS, Uint8)
    for part in cutlass.range_constexpr(cute.ceil_div(tile.steps, 4)):
        word = thread + part * tile.threads
        atom, slot = word // tile.slots, word % tile.slots
        inside = (atom < tile.blocks // ATOM_BLOCKS) & (atom < left)
        if cutlass.const_expr(place.terms.packed):
            inside = inside & place.pads(slot)
        if inside:
            offset = place.scales + atom * ATOM_BYTES + slot * ATOM_BLOCKS
            for _ in cutlass.range_constexpr(1 if place.terms.packed else place.terms.count):
                Array(scales, shape=(1,)).store(zeros, offset, alignment=4)
                offset += place.term_bytes
