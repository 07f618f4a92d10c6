"""Tile of the top-k kernel: threads, cluster and shared memory. Imports no CuTe."""

from dataclasses import dataclass

from nvfp4_kernels.sm90.limits import MAX_SHARED_BYTES  # sm_100 has as much

WARP = 32
QUAD = 4  # elements that a thread loads at once: 16 bytes
QUADS = 8  # quads in flight per thread
assert QUAD * QUADS == 32, "a lane's elements are the bits of a word"
BATCH = WARP * QUAD * QUADS  # elements of a warp's iteration
LINE = 8  # adjacent quads of a sample: 128 bytes
SAMPLE = 8192  # elements of a row's sample
BINS = 1024  # of a histogram
MAX_TIES = 128  # keys that are ranked by comparing each with all
MAX_CLUSTER = 8  # larger clusters are not portable
MAX_TOP_K = 4096
MAX_SLICE = 3 << 18  # columns of a CTA: the bitmap of the chosen ones has 96 KiB
MAX_COLUMNS = MAX_CLUSTER * MAX_SLICE


@dataclass(frozen=True)
class TopkTile:
    """Tile of a top-k launch.

    Attributes:
        threads: number of threads that select together: all threads of a CTA, or some warps.
        cluster: number of CTAs that share a row.
        capacity: number of candidates that the group's buffer holds; greater than ``top_k``.
        words: number of 32-bit words of the bitmap of selected columns, one bit per column.
    """

    threads: int
    cluster: int
    capacity: int
    words: int

    def __post_init__(self) -> None:
        assert self.threads in (128, 256, 512, 1024), self.threads
        assert self.cluster in (1, 2, 4, 8), self.cluster
        assert self.words % self.threads == 0
        assert self.shared_bytes <= MAX_SHARED_BYTES

    @property
    def warps(self) -> int:
        """Number of warps that select together."""
        return self.threads // WARP

    @property
    def thread_sample(self) -> int:
        """Number of elements that a thread samples; the thread keeps only the largest."""
        return SAMPLE // self.threads

    @property
    def chunk(self) -> int:
        """Number of words per chunk of the bitmap; a chunk has one count of selected columns."""
        return self.words // self.threads

    @property
    def shared_bytes(self) -> int:
        """Upper bound on the bytes of shared memory of a CTA."""
        words = self.words + self.threads + 3 * BINS + WARP + 2 * MAX_TIES + 64
        return 8 * self.capacity + 4 * words


def slice_quads(quads: int, cluster: int) -> int:
    """Number of quads per CTA's slice of a row of ``quads`` quads; the last slices may be shorter.

    Slices consist of whole lines.
    """
    return -(-quads // (cluster * LINE)) * LINE


def bitmap_words(columns: int, cluster: int, threads: int) -> int:
    """Number of words, a multiple of ``threads``, of the bitmap of a slice.

    The row has up to ``columns`` columns; up to 8 columns at the ends of the row have bits too.
    """
    bits = QUAD * slice_quads(columns // QUAD, cluster) + 2 * QUAD
    return threads * -(-bits // (WARP * threads))
