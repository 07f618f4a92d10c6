"""Layout of D, A and block scales in tensor memory (PTX ISA 9.7.16.10.5 and 9.7.16.10.7.2).

Matrices lie in rectangles of lanes x columns, so the layout is a few blocks of slices rather than
index arrays. The contents of each rectangle follow figures of the PTX ISA, checked against CUTLASS
(include/cute/atom/mma_traits_sm100_frag.hpp).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import IllegalInstruction, OutOfBounds, UnknownInstruction
from tests.emulator.tcgen05.formats import (
    Bytes,
    Element,
    ScaleFormat,
    Words,
    decode,
    decode_containers,
)
from tests.emulator.tcgen05.instruction import MmaInstruction

LANES = 128
COLUMNS = 512
SUBPARTITION = 32
# A's row is 32 bytes for every kind: 8 columns of 32 bits.
_A_COLUMNS = 8


class Address(NamedTuple):
    """A tensor memory address: bits 16-31 lane, bits 0-15 column (PTX ISA 9.7.16.1.1)."""

    lane: int
    column: int


class Block(NamedTuple):
    """A rectangle of tensor memory and its part of the matrix.

    Attributes:
        lanes, columns: slices of tensor memory.
        rows, entries: slices of the matrix; entries are columns of D, or words of a row of A.
    """

    lanes: slice
    columns: slice
    rows: slice
    entries: slice


def split_address(word: int) -> Address:
    """Lane and column of a 32-bit tensor memory address."""
    return Address(word >> 16, word & 0xFFFF)


def split_scale_address(word: int) -> Address:
    """Lane and column of a block scale's address.

    Bits 30-31 are ignored: CUTLASS leaves there the index of the byte within the word, which the
    instruction descriptor also gives as the scale factor ID.
    """
    return Address(word >> 16 & 0x3FFF, word & 0xFFFF)


def _block(lane: int, column: int, row: int, entry: int, height: int, width: int) -> Block:
    return Block(
        slice(lane, lane + height),
        slice(column, column + width),
        slice(row, row + height),
        slice(entry, entry + width),
    )


def _check_lane(what: str, lane: int, accepted: Sequence[int], layout: str) -> None:
    if lane not in accepted:
        names = " or ".join(str(value) for value in accepted)
        raise IllegalInstruction(
            f"{what} at lane {lane}: layout {layout} begins at lane {names} (PTX ISA 9.7.16.10.5)"
        )


def _check_columns(what: str, column: int, width: int) -> None:
    if column + width > COLUMNS:
        raise OutOfBounds(
            f"{what} takes columns {column} to {column + width - 1} of tensor memory, which has"
            f" {COLUMNS} (PTX ISA 9.7.16.1)"
        )


def _half_datapath(instruction: MmaInstruction) -> bool:
    """Whether D has Layout F, which uses 16 lanes of every subpartition."""
    return instruction.m == 64 and not instruction.weight_stationary


@lru_cache(maxsize=4096)
def accumulator_blocks(instruction: MmaInstruction, address: Address) -> tuple[Block, ...]:
    """Blocks of one CTA's D [m / cta_group, n], the same for both CTAs of a pair.

    Every element takes a whole column, also f16 (PTX ISA 9.7.16.10.4.1).

    Raises:
        IllegalInstruction: the layout may not begin at the lane.
        OutOfBounds: D ends beyond the last column.
    """
    m, n = instruction.m, instruction.n
    lane, column = address
    if _half_datapath(instruction):
        _check_lane("D", lane, (0, 16), "F (M = 64)")
        _check_columns("D", column, n)
        return tuple(_block(lane + 32 * i, column, 16 * i, 0, 16, n) for i in range(4))
    name = {(64, 1): "E", (32, 1): "G", (128, 2): "B", (256, 2): "A"}
    _check_lane("D", lane, (0,), f"{name.get((m, instruction.cta_group), 'D')} (M = {m})")
    # 4x1, 2x2 and 1x4 datapaths: stripes of 128, 64 and 32 lanes share the columns of D.
    height = instruction.a_rows
    stripes = LANES // height
    width = n // stripes
    _check_columns("D", column, width)
    return tuple(_block(height * i, column, 0, width * i, height, width) for i in range(stripes))


@lru_cache(maxsize=4096)
def a_blocks(instruction: MmaInstruction, address: Address, d_lane: int) -> tuple[Block, ...]:
    """Blocks of one CTA's A, words [m / cta_group, 8]; blocks of the same rows are replicas.

    ``d_lane``: lane at which D begins.

    Raises:
        IllegalInstruction: A is M-major, or the layout may not begin at the lane.
        UnknownInstruction: `.ws` with M = 32 or 64.
        OutOfBounds: A ends beyond the last column.
    """
    lane, column = address
    if instruction.transpose_a:
        raise IllegalInstruction(
            "A in tensor memory is row-major, the instruction descriptor asks for an M-major A"
            " (PTX ISA 9.7.16.10.2, Table 53)"
        )
    _check_columns("A", column, _A_COLUMNS)
    if _half_datapath(instruction):
        _check_lane("A", lane, (0, 16), "F (M = 64)")
        if lane != d_lane:
            raise IllegalInstruction(
                f"A at lane {lane} and D at lane {d_lane}: layout F (M = 64) needs the same lane"
                " alignment for both (PTX ISA 9.7.16.10.5)"
            )
        return tuple(_block(lane + 32 * i, column, 16 * i, 0, 16, _A_COLUMNS) for i in range(4))
    rows = instruction.a_rows
    _check_lane("A", lane, (0,), f"of M = {instruction.m}")
    if rows < LANES and instruction.weight_stationary:
        raise UnknownInstruction(
            f"tcgen05.mma.ws with M = {instruction.m} and A in tensor memory: where A lies is not"
            " described"
        )
    # A pair with M = 128 needs A in both halves of the lanes (CUTLASS, TmemAllocMode::Duplicated).
    replicas = LANES // rows
    return tuple(_block(rows * i, column, 0, 0, rows, _A_COLUMNS) for i in range(replicas))


def read_block_matrix(
    tensor: npt.NDArray[Any], blocks: tuple[Block, ...], rows: int, entries: int
) -> npt.NDArray[Any]:
    """The matrix [rows, entries] held by the blocks; a view for a single block."""
    if len(blocks) == 1:
        return tensor[blocks[0].lanes, blocks[0].columns]
    matrix = np.empty((rows, entries), dtype=tensor.dtype)
    for block in blocks:
        matrix[block.rows, block.entries] = tensor[block.lanes, block.columns]
    return matrix


def write_block_matrix(
    tensor: npt.NDArray[Any],
    blocks: tuple[Block, ...],
    matrix: npt.NDArray[Any],
    disabled: npt.NDArray[np.bool_] | None = None,
) -> None:
    """Write the matrix [rows, entries] to the blocks, except disabled lanes (bool [128])."""
    for block in blocks:
        target = tensor[block.lanes, block.columns]
        source = matrix[block.rows, block.entries]
        if disabled is None:
            target[:] = source
        else:
            np.copyto(target, source, where=~disabled[block.lanes, None])


def disabled_lanes(masks: Sequence[int], cta_group: int) -> list[npt.NDArray[np.bool_] | None]:
    """Lanes, bool [128] per CTA, that the words ``masks`` exclude; None if all lanes are written.

    Raises:
        IllegalInstruction: not four words per CTA (PTX ISA 9.7.16.10.9.1).
    """
    if len(masks) != 4 * cta_group:
        raise IllegalInstruction(
            f"disable-output-lane of {len(masks)} words: cta_group::{cta_group} takes"
            f" {4 * cta_group} (PTX ISA 9.7.16.10.9.1)"
        )
    lanes: list[npt.NDArray[np.bool_] | None] = []
    for cta in range(cta_group):
        words = np.array(masks[4 * cta : 4 * cta + 4], dtype="<u4")
        bits = np.unpackbits(words.view(np.uint8), bitorder="little").astype(np.bool_)
        lanes.append(bits if words.any() else None)
    return lanes


def decode_a(instruction: MmaInstruction, words: Words) -> npt.NDArray[np.float32]:
    """A from tensor memory, words [rows, 8], as float32 [rows, k]."""
    raw: Bytes = np.ascontiguousarray(words).view(np.uint8)
    if instruction.kind.padded:
        return decode_containers(raw, instruction.a)
    return decode(raw, instruction.a)


def read_a(
    tensor: Words, instruction: MmaInstruction, address: Address, d_lane: int
) -> npt.NDArray[np.float32]:
    """One CTA's A in tensor memory as float32 [m / cta_group, k].

    Raises:
        IllegalInstruction: see :func:`a_blocks`; or replicas that differ.
    """
    blocks = a_blocks(instruction, address, d_lane)
    words = read_block_matrix(tensor, blocks, instruction.a_rows, _A_COLUMNS)
    for block in blocks:
        if not np.array_equal(tensor[block.lanes, block.columns], words[block.rows]):
            raise IllegalInstruction(
                "A in tensor memory differs between lanes 0-63 and 64-127: a pair with M = 128"
                " needs the same 64 rows in both"
            )
    return decode_a(instruction, words)


class ScaleRegion(NamedTuple):
    """Block scales of `rows` rows: words of 32 lanes x `columns`, in some of the subpartitions.

    Row r of the region is in lane r % 32 and column r // 32 of every subpartition.

    Attributes:
        first_row: row of A or B that row 0 of the region scales.
        rows: number of rows in the region.
        subpartitions: the subpartitions that must hold a copy.
        columns: slice of tensor memory.
    """

    first_row: int
    rows: int
    subpartitions: slice
    columns: slice


@lru_cache(maxsize=4096)
def scale_regions(
    instruction: MmaInstruction, address: Address, *, for_a: bool
) -> tuple[ScaleRegion, ...]:
    """Regions of one CTA's scales of A (the CTA's rows) or of B (all n rows).

    Raises:
        IllegalInstruction: the address is not at lane 0.
        OutOfBounds: the scales end beyond the last column.
    """
    what = "A" if for_a else "B"
    lane, column = address
    if lane:
        raise IllegalInstruction(
            f"block scales of {what} at lane {lane}: they begin at lane 0 of every subpartition"
            " (PTX ISA 9.7.16.10.7)"
        )
    # A pair with M = 128 has a 2x2 datapath: either half of the lanes computes with half of n
    # (CUTLASS, tmem_sf_frg with ScaleFactorDuplicated2by2).
    split = 2 if not for_a and instruction.cta_group == 2 and instruction.m == 128 else 1
    rows = (instruction.a_rows if for_a else instruction.n) // split
    columns = -(-rows // SUBPARTITION)
    _check_columns(f"block scales of {what}", column, columns)
    share = 4 // split
    return tuple(
        ScaleRegion(
            rows * i, rows, slice(share * i, share * (i + 1)), slice(column, column + columns)
        )
        for i in range(split)
    )


def scale_cells(region: ScaleRegion) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Lanes [copies, rows] and columns [rows] of a region's words."""
    row = np.arange(region.rows, dtype=np.intp)
    first = np.arange(region.subpartitions.start, region.subpartitions.stop, dtype=np.intp)
    lanes = first[:, None] * SUBPARTITION + row % SUBPARTITION
    return lanes, region.columns.start + row // SUBPARTITION


def read_scale_bytes(
    tensor: Words, instruction: MmaInstruction, address: Address, *, for_a: bool
) -> Bytes:
    """The scales of A's or B's rows, uint8 [rows, scales per row].

    Raises:
        IllegalInstruction: see :func:`scale_regions`; copies that differ; a negative UE4M3 scale.
        OutOfBounds: see :func:`scale_regions`.
    """
    scale_id = instruction.scale_id_a if for_a else instruction.scale_id_b
    parts = []
    for region in scale_regions(instruction, address, for_a=for_a):
        cells = tensor.reshape(4, SUBPARTITION, COLUMNS)[region.subpartitions, :, region.columns]
        # [copies, rows]: row r is lane r % 32 of column r // 32.
        copies = cells.transpose(0, 2, 1).reshape(len(cells), -1)[:, : region.rows]
        words = np.ascontiguousarray(copies[0])
        raw = words.view(np.uint8).reshape(-1, 4)[:, scale_id : scale_id + instruction.scales]
        used = np.uint32(((1 << 8 * instruction.scales) - 1) << 8 * scale_id)
        if ((copies ^ words) & used).any():
            raise IllegalInstruction(
                f"block scales of {'A' if for_a else 'B'} differ between subpartitions of"
                " tensor memory: every one needs its own copy (PTX ISA 9.7.16.10.7)"
            )
        parts.append(raw)
    scales = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if instruction.scale_format is ScaleFormat.UE4M3 and (scales & 0x80).any():
        raise IllegalInstruction(
            f"a block scale of {'A' if for_a else 'B'} has the sign bit set, UE4M3 has none"
        )
    return scales


def accumulator_values(words: Words, d: Element) -> npt.NDArray[Any]:
    """Words of D as numbers: float32 for f32 and f16, int32 for s32."""
    match d:
        case Element.F32:
            return words.view(np.float32)
        case Element.S32:
            return words.view(np.int32)
    return words.astype(np.uint16).view(np.float16).astype(np.float32)
