"""How a CTA of ``add_rms_norm`` cuts a row. No CuTe in here."""

from dataclasses import dataclass

WARP = 32
VECTOR = 8  # elements of 16 bytes
THREADS, MAX_THREADS = 256, 768  # of a CTA, usually and at most
MAX_STEPS = 4  # 32 float32 sums stay in a thread's registers
MAX_K = MAX_THREADS * MAX_STEPS * VECTOR


@dataclass(frozen=True)
class NormTile:
    """A row is one CTA's: its threads read ``VECTOR`` elements each, ``steps`` times.

    Attributes:
        threads: of a CTA, whole warps.
        steps: of each thread, all loaded before the first is used.
    """

    threads: int
    steps: int

    @property
    def warps(self) -> int:
        return self.threads // WARP
