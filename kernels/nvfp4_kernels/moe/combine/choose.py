"""Choice of the CTAs of ``moe_combine``. Imports no CuTe."""

from dataclasses import dataclass

WARP = 32
VECTOR_BYTES = 16  # bytes per load of a thread
MAX_THREADS = 128
VECTORS_IN_FLIGHT = 16  # vectors that a thread loads before the first addition
STEPS = 4  # of a thread, where there are many tokens
RESIDENT_THREADS = 1024  # of an SM, with the registers that a step takes


@dataclass(frozen=True)
class CombineTile:
    """Shape of the CTAs that sum the expert outputs of one token.

    Attributes:
        threads: threads of a CTA.
        steps: 16-byte vectors of each row of ``y`` per thread.
        ragged: whether some threads' vectors lie past the end of a row.
    """

    threads: int
    steps: int
    ragged: bool


def choose_config(m: int, h: int, element_size: int, sms: int) -> CombineTile:
    """Choose CTAs of whole warps that cover a row with few idle threads. Pure function.

    A thread loads the row indices and weights of a token's slots once for all steps, and takes
    several steps if there are enough tokens to keep all SMs busy.

    Args:
        m: number of tokens.
        h: elements per row.
        element_size: bytes per element of ``y``.
        sms: number of SMs of the device.
    """
    vectors = -(-h * element_size // VECTOR_BYTES)
    steps = STEPS if m * vectors >= sms * RESIDENT_THREADS else 1
    parts = max(1, -(-vectors // (MAX_THREADS * steps)))
    threads = max(WARP, -(-vectors // (parts * steps * WARP)) * WARP)
    return CombineTile(threads, steps, vectors % (threads * steps) != 0)
