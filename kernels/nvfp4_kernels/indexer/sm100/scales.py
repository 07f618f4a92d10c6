"""Scale warps: copy scales from rows in global memory to the tensor core's atoms.

An atom has a word (4 bytes) of each of 128 rows, row ``r`` at byte ``r % 32 · 16 + r // 32 · 4``:
the words of rows ``lane + 32·i`` are the 16 bytes that one lane writes (PTX ISA, tcgen05 block
scaling; ``nvfp4.py``).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Int64, Uint8, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.indexer.sm100.barriers import Barriers
from nvfp4_kernels.indexer.sm100.operands import PageLookup, PageTable, scale_address
from nvfp4_kernels.indexer.sm100.scheduler import TileScheduler
from nvfp4_kernels.indexer.sm100.tile import KEYS, LANE_BYTES, SCALE_WARPS, WORD, ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant
from nvfp4_kernels.sm100.limits import ATOM_BYTES, ATOM_ROWS, WARP_ROWS

MAX_PREFETCH = 4  # key tiles of a warp whose copies are in flight
ROWS = ATOM_ROWS // WARP_ROWS  # of a lane in an atom
UNSIGNED = 0x7F7F7F7F  # UE4M3 is E4M3 without the sign, which NaN may have

Words = list[list[Uint32]]  # scales of a lane's rows


@dataclass(frozen=True)
class ScaleLoader:
    """Role of the two scale warps, which take key tiles alternately; one would be the bottleneck.

    Keys' scales are copied by cp.async, word by word into an atom, and then masked by the copying
    lane. Keys after the last visible key get zeros, as the cache may hold anything there. The
    scales of FP8 keys, which the epilogue reads, are also laid out as an atom.
    """

    tile: ScoreTile
    variant: Variant

    @property
    def _prefetch(self) -> int:
        """Number of this warp's key tiles in flight; so few that the ring cannot deadlock."""
        return min(MAX_PREFETCH, (self.tile.stages - SCALE_WARPS) // SCALE_WARPS)

    @cute.jit
    def run(
        self,
        queries: cute.Pointer,
        page_table: PageTable,
        query_atoms: Array,
        key_atoms: Array,
        barriers: Barriers,
        scheduler: TileScheduler,
        warp: Int32,
    ) -> None:
        """Load key tiles' scales into the ring ``key_atoms``; warp 0 first loads queries' scales.

        ``queries``: block scales of the queries in global memory; ``warp``: 0 or 1.
        """
        tile, lookup = self.tile, PageLookup(self.variant)
        leader = ptx.elect_sync()
        pages, per = lookup.run(page_table, scheduler, Int32(0)), lookup.tiles
        if cutlass.const_expr(tile.block_scaled):
            if scheduler.num_tiles > 0 and warp == 0:
                self._load_queries(queries, query_atoms, scheduler)
                self._publish(barriers.sfq_full, leader)
        # Copies run ahead of what is published; the last steps only publish.
        distance = SCALE_WARPS * self._prefetch
        steps = scheduler.num_tiles + distance
        for batch in cutlass.range(cute.ceil_div(steps, per), unroll=1):
            next_pages = lookup.run(page_table, scheduler, batch + 1)
            first = batch * per
            some = cutlass.min(per, steps - first)
            for step in cutlass.range(cute.ceil_div(some - warp, SCALE_WARPS), unroll=1):
                number = step * SCALE_WARPS + warp
                index = first + number
                if index < scheduler.num_tiles:
                    stage = index % tile.stages
                    wait(barriers.k_empty.subview(stage), index // tile.stages - 1)
                    atoms = key_atoms.subview(stage * tile.key_scale_bytes)
                    self._copy(atoms, page_table, scheduler, index, number, pages)
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(self._prefetch)
                done = index - distance
                if done >= 0:
                    stage = done % tile.stages
                    self._mask(key_atoms.subview(stage * tile.key_scale_bytes))
                    self._publish(barriers.sfk_full.subview(stage), leader)
            pages = next_pages

    @cute.jit
    def _copy(
        self,
        atoms: Array,
        page_table: PageTable,
        scheduler: TileScheduler,
        index: Int32,
        number: Int32,
        pages: Int32,
    ) -> None:
        """Copy the scales of the CTA's key tile ``index``, the page lookup's tile ``number``.

        ``pages``: this lane's page number from ``PageLookup.run``.
        """
        tile, variant = self.tile, self.variant
        lane = cute.arch.lane_idx()
        # A half word is copied together with the preceding half; rows of a lane are all odd or all
        # even.
        odd = lane % 2 if tile.scale_bytes < WORD else Int32(0)
        size = min(tile.scale_bytes, WORD) * (1 + odd)
        rows = max(1, ROWS // variant.boxes)  # rows of a lane that are in the same page
        atoms = atoms.subview(lane * LANE_BYTES)
        first = (scheduler.first_tile + index) * KEYS + lane
        for base in cutlass.range_constexpr(0, ROWS, rows):
            page = PageLookup(variant).page_of_row(pages, number, base * WARP_ROWS + lane)
            key = first + base * WARP_ROWS
            start = scale_address(variant, page_table, page, key - odd, tile.scale_bytes)
            for row in cutlass.range_constexpr(rows):
                beyond = row * WARP_ROWS
                count = Int32(cutlass.select_(key + beyond < scheduler.key_end, size, Int32(0)))
                for word in cutlass.range_constexpr(tile.scale_words):
                    source = start + (beyond * tile.scale_bytes + word * WORD)
                    ptx.cp_async_shared_global(
                        atoms.subview(word * ATOM_BYTES + (base + row) * WORD),
                        cute.make_ptr(Uint8, source, cute.AddressSpace.gmem, assumed_align=WORD),
                        WORD,
                        ptx.LoadCacheModifier.CA,
                        cp_size=count,
                    )

    def _mask(self, atoms: Array) -> None:
        """Mask the words that this lane has copied: clear sign bits (nvfp4), or select half words.

        A word of 2-byte scales (mxfp4, D = 64) keeps only the scales of the word's row, in the low
        half.
        """
        tile = self.tile
        lane = cute.arch.lane_idx()
        if tile.fmt != "nvfp4" and tile.scale_bytes >= WORD:
            return
        for word in range(tile.scale_words):
            offset = word * ATOM_BYTES + lane * LANE_BYTES
            copied = atoms.load(offset, LANE_BYTES, alignment=16).bitcast(Uint32)
            if tile.fmt == "nvfp4":
                words = [copied[row] & Uint32(UNSIGNED) for row in range(ROWS)]
            else:
                # The rows of a lane are all odd or all even, as are the keys.
                shift = Uint32(lane % 2 * 16)
                words = [copied[row] >> shift & Uint32(0xFFFF) for row in range(ROWS)]
            masked = Vector.from_elements(tuple(words), Uint32)
            atoms.store(masked.bitcast(Uint8), offset, alignment=16)

    @cute.jit
    def _load_queries(self, queries: cute.Pointer, atoms: Array, scheduler: TileScheduler) -> None:
        """Load the queries' block scales; row r of the atoms is column r of an accumulator."""
        tile = self.tile
        for atom in cutlass.range_constexpr(tile.query_atoms):
            words = []
            for row in cutlass.range_constexpr(ROWS):
                column = atom * ATOM_ROWS + row * WARP_ROWS + cute.arch.lane_idx()
                query, head = column // tile.head_columns, column % tile.head_columns
                row_index = Int64(scheduler.first_query + query) * tile.num_heads + head
                address = Int64(queries.toint()) + row_index * tile.scale_bytes
                live = (query < scheduler.num_queries) & (head < tile.num_heads)
                words.append(load_words(address, tile.scale_bytes, live))
            self._store(atoms, words, atom)

    def _store(self, atoms: Array, words: Words, atom: int) -> None:
        """Store this lane's words of row atom ``atom`` of the queries' scales."""
        mask = Uint32(UNSIGNED if self.tile.fmt == "nvfp4" else 0xFFFFFFFF)
        for number in range(self.tile.scale_words):
            word = Vector.from_elements(tuple(row[number] & mask for row in words), Uint32)
            index = number * self.tile.query_atoms + atom
            offset = index * ATOM_BYTES + cute.arch.lane_idx() * LANE_BYTES
            atoms.store(word.bitcast(Uint8), offset, alignment=16)

    @cute.jit
    def _publish(self, barrier: Array, leader: Boolean) -> None:
        """Make this warp's writes visible to the tensor core, and arrive."""
        ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        if leader:
            ptx.mbarrier_arrive(barrier)


def load_words(address: Int64, count: int, live: Boolean) -> list[Uint32]:
    """Load ``count`` bytes (2, 4, 8 or 16) as words; if not ``live``, return zeros."""
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
