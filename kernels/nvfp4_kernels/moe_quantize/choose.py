"""Layout of rows in token tiles for ``moe_quantize`` and its siblings. No CuTe in here."""

from dataclasses import dataclass

from nvfp4_kernels.device.rowwise.tile import (
    ATOM_ROWS,
    BLOCK,
    RowTile,
    choose_row_parts,
    choose_whole_rows,
)

LINES = 32  # rows, up to which a CTA writes whole lines of atoms
RESIDENT_THREADS = 1024  # of an SM, with the registers that a row takes
WARP = 32
VECTOR_BYTES = 16  # that a thread copies at once
MAX_COPIED = 4  # such vectors of a thread
MAX_THREADS = 256


def choose_config(rows: int, k: int, element_size: int, per_token: bool, sms: int) -> RowTile:
    """The layout for so many rows of ``k`` elements, of all tiles in use together. Pure."""
    words = BLOCK * element_size // 4
    return (
        choose_whole_rows(rows, k, words, sms)
        if per_token
        else choose_row_parts(rows, k, words, sms)
    )


def turns_of_tile(tile: RowTile, tile_tokens: int, k: int) -> int:
    """Number of CTAs' turns that one token tile takes."""
    columns = -(-k // (tile.blocks * BLOCK))
    if tile_tokens <= LINES:
        return columns * tile_tokens // tile.slots
    return columns * -(-tile_tokens // ATOM_ROWS) * tile.groups


def ctas_of(turns: int, threads: int, sms: int) -> int:
    """CTAs for at most so many turns: as many as there is room for take one after the other."""
    return max(1, min(turns, sms * max(1, RESIDENT_THREADS // threads)))


@dataclass(frozen=True)
class GatherTile:
    """CTA that copies a row at a time: ``steps`` vectors of 16 bytes for each of ``threads``."""

    threads: int
    steps: int


def choose_gather(row_bytes: int) -> GatherTile:
    """Choose whole warps that copy a part of a row, all loads in flight. Pure."""
    vectors = -(-row_bytes // VECTOR_BYTES)
    steps = min(MAX_COPIED, -(-vectors // MAX_THREADS))
    parts = -(-vectors // (MAX_THREADS * steps))
    return GatherTile(max(WARP, -(-vectors // (parts * steps * WARP)) * WARP), steps)
