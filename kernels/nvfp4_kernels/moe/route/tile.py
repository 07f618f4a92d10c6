"""Compile-time layout and sizes of the sort by expert. Imports no CuTe."""

from dataclasses import dataclass

from nvfp4_kernels.moe.routing import TILE_TOKENS

WARP = 32
MAX_THREADS = 1024
MAX_STEPS = 8  # slots of a lane that stay in registers
MAX_CLUSTER = 8  # larger clusters are not portable
MAX_MAPPED = 4096  # experts of all ranks


@dataclass(frozen=True)
class RouteTile:
    """CTAs that sort a batch together; each warp takes neighbouring slots.

    Attributes:
        threads: threads per CTA.
        cluster: CTAs per cluster, which exchange counts.
        steps: slots per lane in one iteration.
        single: whether one iteration covers all slots, so that slots are read and ranked once.
    """

    threads: int
    cluster: int = 1
    steps: int = 1
    single: bool = True

    def __post_init__(self) -> None:
        assert self.threads % WARP == 0
        assert self.threads <= MAX_THREADS
        assert self.cluster in (1, 2, 4, 8)
        assert 1 <= self.steps <= MAX_STEPS

    @property
    def warps(self) -> int:
        """Number of warps per CTA."""
        return self.threads // WARP

    @property
    def slots(self) -> int:
        """Number of slots that the cluster processes per iteration."""
        return self.cluster * self.threads * self.steps


@dataclass(frozen=True)
class Sizes:
    """Sizes of a sort that are constant for a layer.

    Attributes:
        experts: number of experts of this rank.
        mapped: capacity of the expert map, a power of two, at least the number of experts of all
            ranks; 0 without a map.
        tile_tokens: rows per token tile.
    """

    experts: int
    mapped: int
    tile_tokens: int

    def __post_init__(self) -> None:
        assert self.tile_tokens in TILE_TOKENS
        assert self.mapped <= MAX_MAPPED
