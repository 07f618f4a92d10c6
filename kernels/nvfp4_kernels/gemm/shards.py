"""Shards of a weight, e.g. q, k and v, as arguments of the GEMM kernels."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, get_args

from cutlass import Int32

from nvfp4_kernels.gemm.arguments import MAX_SHARDS

# End of each shard but the last, along the weight's rows; zeros for absent shards.
ShardEnds = tuple[Int32, Int32, Int32, Int32, Int32, Int32, Int32]
assert len(get_args(ShardEnds)) == MAX_SHARDS - 1


def shard_ends(sizes: Sequence[int]) -> Any:
    """Host integers for a kernel's ``ShardEnds``; ``sizes``: weight rows of each shard."""
    ends = list(accumulate(sizes[:-1]))
    return (*ends, *[0] * (MAX_SHARDS - 1 - len(ends)))
