"""Layout of a CTA's threads over a row, and the choice of a layout for a problem. Imports no CuTe.

A thread has vectors of 8 elements: one load of a 16-bit type, one 8-byte store of E4M3.
Neighbouring threads have neighbouring vectors.
"""

from dataclasses import dataclass

from nvfp4_kernels.checks import InvalidArgument

VECTOR = 8  # elements
WARP = 32
THREADS, MAX_THREADS = 256, 768  # of a CTA: usual and maximum
FEW_THREADS = 128  # of a CTA where CTAs are too few for the device
LOADED_WORDS = 32  # 32-bit registers a thread loads before it waits
MAX_STEPS = 4  # of a thread that has a part of a row
RESIDENT_THREADS = 2048  # of an SM


@dataclass(frozen=True)
class VectorTile:
    """Layout of a CTA over a row or a part of one: a thread has ``steps`` vectors.

    Attributes:
        threads: threads per CTA, a multiple of 32.
        steps: vectors per thread.
    """

    threads: int
    steps: int

    @property
    def warps(self) -> int:
        """Number of warps per CTA."""
        return self.threads // WARP

    @property
    def elements(self) -> int:
        """Number of elements that a CTA covers, a multiple of 256."""
        return self.threads * self.steps * VECTOR


def choose_row_parts(m: int, k: int, words: int, sms: int) -> VectorTile:
    """Choose the layout for kernels that process a row's vectors independently. Pure function.

    Threads load up to 128 bytes before they wait if that many threads fill the device; else they
    have one vector each, so that few rows are spread over more SMs.

    Args:
        m: number of rows, of all matrices together.
        k: elements per row.
        words: 32-bit words loaded per vector.
        sms: number of SMs of the device.
    """
    vectors = _ceil_div(k, VECTOR)
    for steps in (MAX_STEPS, MAX_STEPS // 2):
        parts = _ceil_div(vectors, THREADS * steps)
        tile = VectorTile(_whole_warps(_ceil_div(vectors, parts * steps)), steps)
        if steps * words <= LOADED_WORDS and m * parts * tile.threads >= RESIDENT_THREADS * sms:
            return tile
    threads = THREADS if m * vectors >= RESIDENT_THREADS * sms else FEW_THREADS
    return VectorTile(min(threads, _whole_warps(vectors)), 1)


def choose_whole_rows(m: int, k: int, words: int, sms: int) -> VectorTile:
    """Choose the layout for kernels that reduce a row before writing any part. Pure function.

    A row stays in registers between the passes. With few rows more threads share a row.

    Args:
        m: number of rows, of all matrices together.
        k: elements per row.
        words: 32-bit registers that a vector occupies between the passes.
        sms: number of SMs of the device.

    Raises:
        InvalidArgument: the row is too long for one CTA's registers.
    """
    longest = longest_row(words)
    if k > longest:
        raise InvalidArgument(
            f"x: K is {k}, must be at most {longest}; quantise longer rows with StaticFp8"
        )
    vectors, most = _ceil_div(k, VECTOR), LOADED_WORDS // words
    usual = THREADS if m >= 2 * sms else 2 * THREADS
    steps = min(most, _ceil_div(vectors, usual))
    return VectorTile(_whole_warps(_ceil_div(vectors, steps)), steps)


def longest_row(words: int) -> int:
    """Number of elements of the longest row that a CTA holds in ``words`` registers per vector."""
    return MAX_THREADS * (LOADED_WORDS // words) * VECTOR


def _whole_warps(threads: int) -> int:
    return _ceil_div(threads, WARP) * WARP


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
