"""Threads of ``moe_combine``. No CuTe in here."""

from dataclasses import dataclass

WARP = 32
VECTOR_BYTES = 16  # of a row that a thread adds up
MAX_THREADS = 128
SLOTS_IN_FLIGHT = 16  # that a thread has loaded before it adds the first


@dataclass(frozen=True)
class CombineTile:
    """CTAs of one token: each has ``threads``, one for every 16 bytes of its part of a row."""

    threads: int


def choose_config(h: int, element_size: int) -> CombineTile:
    """Choose whole warps, as many to each CTA of a token, few of them beyond its end. Pure.

    Args:
        h: elements of a row.
        element_size: bytes of one.
    """
    vectors = -(-h * element_size // VECTOR_BYTES)
    parts = max(1, -(-vectors // MAX_THREADS))
    return CombineTile(max(WARP, -(-vectors // (parts * WARP)) * WARP))
