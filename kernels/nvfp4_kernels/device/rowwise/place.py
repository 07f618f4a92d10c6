"""Positions of a thread's blocks, and loads and stores of them."""

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
    """A thread's blocks: block ``first + step · tile.stride`` of one row, for every step.

    Attributes:
        tile: of the CTA.
        terms: of the operand that is written.
        m: rows of a matrix.
        batch: index of the row's matrix.
        term_bytes: from one term's scales to the next one's.
        inside: whether the row exists; if not, it is padding of the scales.
        live: whether any row of the CTA exists.
        row: its index among the rows of all matrices.
        first: its first block.
        first_of_cta: the CTA's first block.
        blocks: of a row.
        slot: of the row, among those of the CTA.
        first_slot: of the CTA, among those of an atom.
        lane: index among the threads of a warp that share the row.
        warp: index in the CTA.
        scales: offset of the CTA's first scale, in bytes.
        line_rows: rows of a matrix of whose atoms the CTA writes whole lines; 0: it does not.
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
        """The block of ``step``; beyond the row's last one, there is nothing to do."""
        return self.first + step * self.tile.stride

    def element(self, step: int) -> Int64:
        """Index in the row of the first element of ``step``."""
        return Int64(self.first) * BLOCK + step * self.tile.stride * BLOCK

    def term_row(self, term: int) -> Int64:
        """Index of a term's row among those of all terms and matrices."""
        return self.row + (Int64(self.batch) * (self.terms.count - 1) + term) * self.m

    def pads(self, slot: Int32) -> Boolean:
        """Whether one of the CTA's slots, of an atom that terms share, holds no term of any row."""
        of_atom = self.first_slot + slot
        return (of_atom // 4 >= self.m) | (of_atom % 4 >= self.terms.count)

    def has(self, step: int) -> Boolean:
        """Whether there is a block to read and write in ``step``."""
        return self.inside & (self.block(step) < _unknown(self.blocks))


def steps_ahead(element: type[cutlass.Numeric], inputs: int) -> int:
    """Number of steps that a thread loads ``inputs`` blocks each for, before it uses the first."""
    return max(1, LOADED_WORDS // (inputs * BLOCK * element.width // 32))


def ctas(tile: RowTile, m: Int32, k: Int32, batch: Int32) -> Int32:
    """Size of the grid: all rows that have scales, padding included."""
    columns = cute.ceil_div(k, tile.blocks * BLOCK)
    return columns * cute.ceil_div(m, ATOM_ROWS) * tile.groups * batch


def find(tile: RowTile, m: Int32, k: Int32, terms: TermLayout) -> Place:
    """This thread's place; CTAs run along the rows first."""
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
    """A thread's place in one CTA's part of a group of rows.

    ``thread``: among the tile's; None: this thread's index in the CTA.
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
    """A thread's place in matrices of at most 32 rows: a row is a line of its atoms.

    Scales of rows 0 to 31 lie 16 bytes apart, those that would be of rows 32 to 127, or are of
    further terms, behind them. CTAs take neighbouring rows, and with each the whole lines of it and
    of every ``rows``-th one after it: no CTA has padding alone. ``thread``: as of ``find_at``.
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
    """The number, of which the compiler knows no value.

    Else it knows that some loads always or never have a row to read, and prints their predicate as
    a number, which is no PTX.
    """
    if not isinstance(number, int):
        return number
    return ptx.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(number)]
    )


def _row(slot: Int32) -> Int32:
    """Row of an atom whose scales lie at ``slot``; grows with the slot within a warp's."""
    return slot % 4 * 32 + slot // 4


def load_block(
    source: cute.Pointer, index: Int64, inside: Boolean, streamed: bool = True
) -> Vector:
    """16 elements at ``index``; zeros if not ``inside``.

    ``streamed``: nobody else will read them, so that L1 need not keep them.
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
    """Has L2 fetch 16 elements at ``index``, if ``inside``; nothing that kernels write."""
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
    """Codes where there is data, scales where there are atoms: padding is a block of zeros."""
    tile = place.tile
    if place.has(step):
        codes = Array(data, shape=(1,))
        offset = place.term_row(term) * (place.blocks * (BLOCK // 2)) + place.element(step) // 2
        codes.store(block.codes.bitcast(Uint8), offset, alignment=8)
    stored = place.block(step) < _atoms_across(place.blocks) * ATOM_BLOCKS
    if cutlass.const_expr(place.line_rows > 0):
        stored = Boolean(False)  # store_lines() does so, of several blocks at once
    elif cutlass.const_expr(place.terms.packed):
        # Padding is the first term's to write. Where there is a row, its slot is the first term's.
        stored = stored & (place.inside | place.pads(place.slot) if term == 0 else place.inside)
    if stored:
        offset = place.scales + place.slot * ATOM_BLOCKS + place.lane % ATOM_BLOCKS
        offset += (place.first - place.first_of_cta) // ATOM_BLOCKS * ATOM_BYTES
        offset += step * tile.stride // ATOM_BLOCKS * ATOM_BYTES
        offset += term * (ATOM_BLOCKS if place.terms.packed else place.term_bytes)
        Array(scales, shape=(1,)).store(block.scale, offset)


@cute.jit
def store_lines(place: Place, blocks: list[list[Block]], scales: cute.Pointer) -> None:
    """Whole lines of atoms: a row's scales, of each term a word, and zeros behind them.

    Four threads with the blocks of one line bring their scales together. Then each writes lines of
    its own: of that row, of those that hold no row, or of another step.

    Args:
        place: in lines.
        blocks: of every step, its terms'.
        scales: to write.
    """
    in_atom = place.lane % ATOM_BLOCKS
    words = [[_gathered(block.scale, in_atom) for block in of_step] for of_step in blocks]
    lines = ATOM_LINES // place.line_rows  # that a row's threads write of an atom
    across = min(ATOM_BLOCKS, max(1, ATOM_BLOCKS // lines))  # steps that they write at once
    turns = max(1, lines // ATOM_BLOCKS)
    first_atom = (place.first - place.first_of_cta) // ATOM_BLOCKS
    for first in cutlass.range_constexpr(0, place.tile.steps, across):
        for turn in cutlass.range_constexpr(turns):
            of_lane = in_atom // (ATOM_BLOCKS // across)
            line = in_atom % (ATOM_BLOCKS // across) + turn * ATOM_BLOCKS
            step = first + of_lane
            value = _line(words[first : first + across], of_lane, line == 0)
            block = place.first + step * place.tile.stride
            is_atom = block < _atoms_across(place.blocks) * ATOM_BLOCKS
            if is_atom & (step < place.tile.steps):
                offset = place.scales + (place.slot + line * place.line_rows) * LINE_BYTES
                offset += (first_atom + step * (place.tile.stride // ATOM_BLOCKS)) * ATOM_BYTES
                Array(scales, shape=(1,)).store(value, offset, alignment=LINE_BYTES)


def _line(words: list[list[Uint32]], step: Int32, is_row: Boolean) -> Vector:
    """16 bytes of the terms of the step of this thread, zeros if the line holds no row."""
    line = [Uint32(0)] * ATOM_BLOCKS
    for number, of_step in enumerate(words):
        chosen = is_row & (step == number)
        for term, word in enumerate(of_step):
            line[term] = Uint32(cutlass.select_(chosen, word, line[term]))
    return Vector.from_elements(tuple(line), Uint32).bitcast(Uint8)


def _gathered(scale: Uint8, in_atom: Int32) -> Uint32:
    """Word of the scales of four neighbouring threads, in each of them."""
    word = scale.to(Uint32) << (8 * in_atom).to(Uint32)
    for mask in (1, 2):
        word = word | cute.arch.shuffle_sync_bfly(word, mask)
    return word


@cute.jit
def store_elements(
    place: Place, step: cutlass.Constexpr, elements: Vector, target: cute.Pointer
) -> None:
    """16 elements of the input's dtype, to rows without gaps."""
    if place.has(step):
        offset = place.row * (place.blocks * BLOCK) + place.element(step)
        Array(target, shape=(1,)).store(elements, offset, alignment=32)


@cute.jit
def store_padding(place: Place, scales: cute.Pointer) -> None:
    """Zeros for the scales of a CTA without a row."""
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
