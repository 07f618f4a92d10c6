"""The scale warp: block scales, from rows in global memory to the tensor core's atoms.

An atom has a word of each of 128 rows: row ``r`` at ``r % 32 · 16 + r // 32 · 4``, so that a lane
that has rows ``lane + 32·i`` writes 16 bytes (PTX ISA, tcgen05 block scaling; ``nvfp4.py``).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Int64, Uint8, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.sm100.barriers import wait
from nvfp4_kernels.sm100.indexer.barriers import Barriers
from nvfp4_kernels.sm100.indexer.operands import Pages, page_of, scale_address
from nvfp4_kernels.sm100.indexer.tile import KEYS, WORD, ScoreTile, Variant
from nvfp4_kernels.sm100.indexer.work import Work
from nvfp4_kernels.sm100.tile import ATOM_BYTES, ATOM_ROWS, WARP_ROWS

AHEAD = 4  # tiles whose scales are on their way
ROWS = ATOM_ROWS // WARP_ROWS  # of a lane in an atom
UNSIGNED = 0x7F7F7F7F  # UE4M3 is E4M3 without the sign, which NaN may have

Words = list[list[Uint32]]  # of a lane's rows


@dataclass(frozen=True)
class ScaleLoader:
    """Role of one warp. Rows that nobody sees get zeros: what lies there may be anything."""

    tile: ScoreTile
    variant: Variant

    @cute.jit
    def run(
        self,
        queries: cute.Pointer,
        pages: Pages,
        query_atoms: Array,
        key_atoms: Array,
        barriers: Barriers,
        work: Work,
    ) -> None:
        """Scales of the queries, then of key tiles, into a ring of ``key_atoms``."""
        tile = self.tile
        leader = ptx.elect_sync()
        numbers = self._pages(pages, work, Int32(0))
        coming = []
        for ahead in cutlass.range_constexpr(AHEAD):
            coming.append(self._load(pages, work, Int32(ahead), numbers))
            numbers = self._pages(pages, work, Int32(ahead + 1))
        if work.tiles > 0:
            self._queries(queries, query_atoms, work)
            self._publish(barriers.graded, leader)
        for index in cutlass.range(work.tiles, unroll=1):
            following = self._load(pages, work, index + AHEAD, numbers)
            numbers = self._pages(pages, work, index + AHEAD + 1)
            stage = index % tile.stages
            wait(barriers.empty.subview(stage), index // tile.stages - 1)
            self._store(key_atoms.subview(stage * tile.key_scale_bytes), coming[0], Int32(0), 1)
            self._publish(barriers.scaled.subview(stage), leader)
            coming = [*coming[1:], following]

    def _key(self, work: Work, index: Int32, row: int) -> Int32:
        """Of the ``index``-th tile: that of a row of this lane."""
        key = (work.first_tile + index) * KEYS + row * WARP_ROWS + cute.arch.lane_idx()
        return Int32(cutlass.select_(index < work.tiles, key, work.end))

    def _pages(self, pages: Pages, work: Work, index: Int32) -> list[Int32]:
        """Of this lane's rows."""
        keys = [self._key(work, index, row) for row in range(ROWS)]
        return [page_of(self.variant, pages, work, key) for key in keys]

    def _load(self, pages: Pages, work: Work, index: Int32, numbers: list[Int32]) -> Words:
        words = []
        for row, page in enumerate(numbers):
            key = self._key(work, index, row)
            address = scale_address(self.variant, pages, page, key, self.tile.scale_bytes)
            words.append(load_words(address, self.tile.scale_bytes, key < work.end))
        return words

    @cute.jit
    def _queries(self, queries: cute.Pointer, atoms: Array, work: Work) -> None:
        """Row ``r`` is column ``r`` of the accumulator."""
        tile = self.tile
        for atom in cutlass.range_constexpr(tile.query_atoms):
            words = []
            for row in cutlass.range_constexpr(ROWS):
                column = atom * ATOM_ROWS + row * WARP_ROWS + cute.arch.lane_idx()
                query, head = column // tile.head_columns, column % tile.head_columns
                place = Int64(work.first_query + query) * tile.heads + head
                address = Int64(queries.toint()) + place * tile.scale_bytes
                live = (query < work.queries) & (head < tile.heads)
                words.append(load_words(address, tile.scale_bytes, live))
            self._store(atoms, words, Int32(atom), tile.query_atoms)

    def _store(self, atoms: Array, words: Words, atom: Int32, across: int) -> None:
        """``across``: atoms of rows to each word along D."""
        mask = Uint32(UNSIGNED if self.tile.fmt == "nvfp4" else 0xFFFFFFFF)
        for number in range(self.tile.scale_words):
            word = Vector.from_elements(tuple(row[number] & mask for row in words), Uint32)
            offset = (number * across + atom) * ATOM_BYTES + cute.arch.lane_idx() * 16
            atoms.store(word.bitcast(Uint8), offset, alignment=16)

    @cute.jit
    def _publish(self, barrier: Array, leader: Boolean) -> None:
        """What this warp has written, to the tensor core."""
        ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        if leader:
            ptx.mbarrier_arrive(barrier)


def load_words(address: Int64, count: int, live: Boolean) -> list[Uint32]:
    """``count`` bytes, 2 to 16, as words; zeros if not ``live``."""
    words = max(1, count // WORD)
    names = ", ".join(f"{{$w{n}}}" for n in range(words))
    zeros = " ".join(f"mov.b32 {{$w{n}}}, 0;" for n in range(words))
    if count < WORD:
        load = "@live ld.global.u16 {$w0}, [{$r0}];"
    elif words == 1:
        load = "@live ld.global.b32 {$w0}, [{$r0}];"
    else:
        load = f"@live ld.global.v{words}.b32 {{{names}}}, [{{$r0}}];"
    # Predicated rather than branched around, so that all loads start before the thread waits. The
    # predicate may be known at compile time, when it would be no register.
    loaded = ptx.inline_ptx(
        f"{{ .reg .pred live; setp.ne.b32 live, {{$r1}}, 0; {zeros} {load} }}",
        write_only_types=[Uint32] * words,
        read_only_args=[address, Int32(live)],
    )
    return [loaded] if words == 1 else list(loaded)
