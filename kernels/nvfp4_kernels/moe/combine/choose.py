"""Threads of ``moe_combine``. No CuTe in here."""

from dataclasses import dataclass

WARP = 32
VECTOR_BYTES = 16  # bytes per load of a thread
MAX_THREADS = 128
VECTORS_IN_FLIGHT = 16  # vectors that a thread loads before the first addition
STEPS = 4  # of a thread, where there are many tokens
RESIDENT_THREADS = 1024  # of an SM, with the registers that a step takes


@dataclass(frozen=True)
class CombineTile:
    """CTAs of one token.

    Attributes:
        threads: threads of a CTA.
        steps: 16-byte vectors that each thread adds up.
        ragged: whether some vectors lie past the end of a row.
    """

    threads: int
    steps: int
    ragged: bool


def choose_config(m: int, h: int, element_size: int, sms: int) -> CombineTile:
    """Choose whole warps, equally many per CTA of a token, few of them past the row's end. Pure.

    A thread loads rows and weights of a token's slots once for all of its steps, and so takes
    several steps where there are enough tokens to keep all SMs busy.

    Args:
        m: number of tokens.
        h: elements of a row.
        element_size: bytes of an element.
        sms: SMs of the device.
    """
    vectors = -(-h * element_size // VECTOR_BYTES)
    steps = STEPS if m * vectors >= sms * RESIDENT_THREADS else 1
    parts = max(1, -(-vectors // (MAX_THREADS * steps)))
    threads = max(WARP, -(-vectors // (parts * steps * WARP)) * WARP)
    return CombineTile(threads, steps, vectors % (threads * steps) != 0)
