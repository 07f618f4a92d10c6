"""Tile of ``add_rms_norm``: the thread layout of a row. Imports no CuTe."""

from dataclasses import dataclass

WARP = 32
VECTOR = 8  # elements: 16 bytes
THREADS, MAX_THREADS = 256, 768  # per CTA, usual and maximum
MAX_STEPS = 4  # 32 float32 sums stay in a thread's registers
MAX_K = MAX_THREADS * MAX_STEPS * VECTOR


@dataclass(frozen=True)
class NormTile:
    """Thread layout of a CTA over one row: a thread has ``steps`` vectors of ``VECTOR`` elements.

    Attributes:
        threads: threads per CTA, a multiple of 32.
        steps: vectors per thread, all loaded before the first is used.
    """

    threads: int
    steps: int

    @property
    def warps(self) -> int:
        """Number of warps per CTA."""
        return self.threads // WARP
