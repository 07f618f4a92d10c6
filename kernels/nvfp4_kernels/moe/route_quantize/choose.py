"""Choice between one launch and two. No CuTe in here."""

from nvfp4_kernels.moe.quantize.choose import LINES
from nvfp4_kernels.moe.route.tile import MAX_STEPS, RouteTile
from nvfp4_kernels.moe.routing import max_tiles

MAX_SLOTS = 256  # most slots that every CTA sorts itself
CTAS_PER_SM = 1  # each of which sorts: several get in one another's way


def is_one_launch(slots: int, tile_tokens: int, threads: int) -> bool:
    """Whether every CTA sorts the whole batch itself, rather than wait for a sorting kernel. Pure.

    Args:
        slots: slots of the batch.
        tile_tokens: rows of a token tile.
        threads: threads of a CTA.
    """
    return slots <= min(MAX_SLOTS, threads * MAX_STEPS) and tile_tokens <= LINES


def sort_tile(slots: int, threads: int) -> RouteTile:
    """Layout of the sort by one CTA of ``threads`` threads."""
    return RouteTile(threads, steps=max(1, -(-slots // threads)))


def row_capacity(slots: int, experts: int, tile_tokens: int) -> int:
    """Entries of the row-to-slot table; a power of two, so that few kernels serve many batches."""
    rows = max_tiles(slots, experts, tile_tokens) * tile_tokens
    return max(256, 1 << (rows - 1).bit_length())


def ctas_of(turns: int, sms: int) -> int:
    """CTAs for at most ``turns`` turns: few CTAs sort, and each takes several turns."""
    return max(1, min(turns, sms * CTAS_PER_SM))
