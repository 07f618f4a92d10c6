"""Scheduler: assigns a KV head of a sequence to a cluster, and keys to warps."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Int64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.decode.sm90.tile import KEYS, WARPS


@dataclass(frozen=True)
class WorkTile:
    """Work tile of a warp: a KV head of a sequence, and steps along its keys.

    Attributes:
        sequence, kv_head: indices of the sequence and of the KV head.
        rank: rank of the CTA in its cluster.
        begin, end: keys that the token sees, ``begin <= key < end``; the token's own key is the
            last.
        first: index of the first box of the warp's first step, counted from key 0.
        steps: number of steps of the warp, ``step_stride`` boxes apart.
        stores: whether the token's own key is in the warp's last step.
    """

    sequence: Int32
    kv_head: Int32
    rank: Int32
    begin: Int32
    end: Int32
    first: Int32
    steps: Int32
    stores: Boolean


@cute.jit
def work_tile(
    tile: cutlass.Constexpr,
    variant: cutlass.Constexpr,
    seq_lens: cute.Pointer,
    window: Int32,
    warp: Int32,
) -> WorkTile:
    """Work tile of this warp."""
    _, kv_head, sequence = cute.arch.block_idx()
    rank = ptx.cluster_ctarank()
    end = Int32(Array(seq_lens, shape=(1,)).load(Int64(sequence)))
    begin = Int32(0)
    if cutlass.const_expr(variant.window):
        begin = cutlass.max(end - window, Int32(0))
    last = cute.ceil_div(end, KEYS)
    first = begin // KEYS + (rank * WARPS + warp) * tile.boxes
    steps = cutlass.max(cute.ceil_div(last - first, tile.step_stride), Int32(0))
    return WorkTile(
        sequence=sequence,
        kv_head=kv_head,
        rank=rank,
        begin=begin,
        end=end,
        first=first,
        steps=steps,
        stores=(steps > 0) & (first + (steps - 1) * tile.step_stride + tile.boxes >= last),
    )
