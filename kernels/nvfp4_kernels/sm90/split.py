"""Adding up the parts of a split K: of the CTAs of a cluster, and of slices in each."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.fragments import TILE
from nvfp4_kernels.mbarrier import CLUSTER, wait
from nvfp4_kernels.sm90.tile import WARPGROUP, Tile


@dataclass(frozen=True)
class Parts:
    """Shared memory of a split.

    Attributes:
        sums: float32 [part of K, product, row of this CTA's share, token].
        arrived: mbarrier: all parts are here.
    """

    sums: Array
    arrived: Array


@dataclass(frozen=True)
class Split:
    """Every CTA of the cluster finishes its share of the rows, for all of them.

    | barrier | arrivals | by |
    |---|---|---|
    | ``arrived`` | one per warp of every CTA | whoever has sent what belongs here |
    """

    tile: Tile

    @property
    def arrivals(self) -> int:
        return 4 * self.tile.warpgroups * self.tile.split_k

    @cute.jit
    def send(self, sums: list[list[Float32]], parts: Parts, rank: Int32, group: Int32) -> None:
        """A warpgroup's fragments, to whom their rows belong."""
        tile = self.tile
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        lane = thread % 32
        upper = thread // 32 * 16 + lane // 4
        part, team = rank * tile.slices + group % tile.slices, group // tile.slices
        for each in cutlass.range_constexpr(tile.accumulators):
            product, row_tile = each // tile.row_tiles, each % tile.row_tiles
            for half in cutlass.range_constexpr(2):
                row = (team * tile.row_tiles + row_tile) * TILE + upper + 8 * half
                owner = row // tile.share
                target = ptx.mapa(parts.sums, owner)
                first = self._place(part, product, row % tile.share) + lane % 4 * 2
                for eight in cutlass.range_constexpr(0, tile.tokens, 8):
                    at = eight // 2 + 2 * half
                    pair = Vector.from_elements((sums[each][at], sums[each][at + 1]), Float32)
                    target.store(pair, first + eight, alignment=8)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        if lane < tile.split_k:
            ptx.mbarrier_arrive(ptx.mapa(parts.arrived, lane), scope=ptx.MemScope.CLUSTER)

    def wait(self, parts: Parts) -> None:
        """Until all parts are here."""
        wait(parts.arrived, Int32(0), CLUSTER)

    def added(self, parts: Parts, product: int, row: Int32, token: Int32) -> Float32:
        """Of a row of this CTA's share; always in the same order, whoever came first."""
        total = Float32(0.0)
        for part in range(self.tile.parts):
            total = total + parts.sums.load(self._place(Int32(part), product, row) + token)
        return total

    def _place(self, part: Int32, product: int, row: Int32) -> Int32:
        tile = self.tile
        return ((part * tile.weights + product) * tile.share + row) * tile.part_pitch
