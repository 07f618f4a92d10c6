"""Layout of rows in token tiles for ``moe_quantize`` and its siblings. No CuTe in here."""

from dataclasses import dataclass

from nvfp4_kernels.device.rowwise.tile import (
    ATOM_ROWS,
    BLOCK,
    RowTile,
    choose_whole_rows,
)

LINES = 32  # rows, up to which a CTA writes whole lines of atoms
SLOTS, WARPS = 8, 4  # of a CTA whose rows share a global scale
RESIDENT_THREADS = 1024  # of an SM, with the registers that a row takes
WARP = 32
VECTOR_BYTES = 16  # bytes per copy of a thread
MAX_COPIED = 4  # such vectors of a thread
MAX_THREADS = 256


def choose_config(rows: int, k: int, element_size: int, per_token: bool, sms: int) -> RowTile:
    """Choose the layout for ``rows`` rows of ``k`` elements, over all tiles in use. Pure.

    With one global scale CTAs are small, many per SM: while one CTA waits for slots or tokens,
    others quantise, and an SM with one more turn than another is not much slower.
    """
    if per_token:
        return choose_whole_rows(rows, k, BLOCK * element_size // 4, sms)
    return RowTile(SLOTS, WARPS, 1)


def columns_of_row(tile: RowTile, k: int) -> int:
    """Number of CTAs that share a row."""
    return -(-k // (tile.blocks * BLOCK))


def groups_of_tile(tile: RowTile, tile_tokens: int) -> int:
    """Number of row groups of one token tile; a CTA takes a group."""
    if tile_tokens <= LINES:
        return tile_tokens // tile.slots
    return -(-tile_tokens // ATOM_ROWS) * tile.groups


def turns_of_tile(tile: RowTile, tile_tokens: int, k: int) -> int:
    """Number of CTA turns for one token tile."""
    return columns_of_row(tile, k) * groups_of_tile(tile, tile_tokens)


def ctas_of(turns: int, threads: int, sms: int) -> int:
    """CTAs for at most ``turns`` turns: as many as can be resident, each taking several turns."""
    return max(1, min(turns, sms * max(1, RESIDENT_THREADS // threads)))


@dataclass(frozen=True)
class GatherTile:
    """CTA that copies a row at a time: ``steps`` 16-byte vectors for each of ``threads``."""

    threads: int
    steps: int


def choose_gather(row_bytes: int) -> GatherTile:
    """Choose whole warps that copy a part of a row, all loads in flight. Pure."""
    vectors = -(-row_bytes // VECTOR_BYTES)
    steps = min(MAX_COPIED, -(-vectors // MAX_THREADS))
    parts = -(-vectors // (MAX_THREADS * steps))
    return GatherTile(max(WARP, -(-vectors // (parts * steps * WARP)) * WARP), steps)
