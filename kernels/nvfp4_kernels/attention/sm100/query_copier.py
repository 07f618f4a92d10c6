"""Query warps: loads of the next queries while the softmax warps finish the previous work tile."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32, Int64, Uint8
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.barriers import Barriers
from nvfp4_kernels.attention.sm100.queries import Queries, QueryLoader
from nvfp4_kernels.attention.sm100.rows import VECTOR_BYTES, WarpRows, swizzled_offset
from nvfp4_kernels.attention.sm100.scheduler import WorkTile, query_row
from nvfp4_kernels.attention.sm100.tile import WARPS, AttentionTile, Variant
from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.sm100.limits import WARP_ROWS, widest_swizzle

SWIZZLE_ROWS = 8  # after which the pattern of a swizzle begins anew


@dataclass(frozen=True)
class QueryCopier:
    """Role of one warp per query tile: cp.async of all rows at once, without registers."""

    tile: AttentionTile
    variant: Variant

    @cute.jit
    def run(
        self, queries: Queries, shared: Array, barriers: Barriers, work: WorkTile, query_tile: Int32
    ) -> None:
        """Copy a query tile, zeros past the last row, once the previous queries are consumed.

        The consumers are the QK MMAs, or the softmax warps if softmax warps quantise queries.

        Args:
            queries: queries in global memory.
            shared: shared memory of the query tile's rows in 16 bits.
            barriers: mbarriers of the CTA.
            work: work tile; must have at least one key.
            query_tile: query tile of the warp.
        """
        quantized, mine = self.tile.quantizes_copied, query_tile
        empty = barriers.taken.subview(mine) if quantized else barriers.q_empty
        full = (barriers.copied if quantized else barriers.q_full).subview(mine)
        wait(empty, work.before.work_tiles - 1)
        for warp in cutlass.range_constexpr(WARPS):
            self._copy_rows(queries, shared, work, query_tile, Int32(warp))
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        if cutlass.const_expr(not self.tile.quantizes_copied):
            ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        if ptx.elect_sync():
            ptx.mbarrier_arrive(full)

    def _copy_rows(
        self, queries: Queries, shared: Array, work: WorkTile, query_tile: Int32, warp: Int32
    ) -> None:
        """Copy the rows of softmax warp ``warp``."""
        tile, variant = self.tile, self.variant
        rows = WarpRows(tile.copied_row_bytes, cute.arch.lane_idx())
        row = query_row(tile, variant, work, query_tile, warp)
        start = QueryLoader(tile, variant).row_units(queries, work, row)
        # All shuffles before the first copy, so that they overlap.
        starts = [rows.from_row_owner(start, iteration) for iteration in range(rows.iterations)]
        chunk_bytes = widest_swizzle(rows.row_bytes)
        period = max(1, SWIZZLE_ROWS // rows.rows_per_iteration)
        offsets = [
            [
                swizzled_offset(rows.row_bytes, warp * WARP_ROWS + rows.row(n), rows.byte(index))
                for index in range(rows.vectors_per_lane)
            ]
            for n in range(min(period, rows.iterations))
        ]
        for iteration, units in enumerate(starts):
            size = cutlass.select_(units >= 0, Int32(VECTOR_BYTES), Int32(0))
            source = Int64(queries.q.toint()) + Int64(cutlass.max(units, 0)) * VECTOR_BYTES
            beyond = iteration // period * period * rows.rows_per_iteration * chunk_bytes
            for index, offset in enumerate(offsets[iteration % period]):
                ptx.cp_async_shared_global(
                    shared.subview(offset + beyond),
                    cute.make_ptr(
                        Uint8,
                        source + rows.byte(index),
                        cute.AddressSpace.gmem,
                        assumed_align=VECTOR_BYTES,
                    ),
                    VECTOR_BYTES,
                    ptx.LoadCacheModifier.CG,
                    cp_size=size,
                )
