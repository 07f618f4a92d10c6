"""Execution of a tcgen05.mma on the memories of one CTA or a pair, and the cells it touches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import IllegalInstruction
from tests.emulator.tcgen05.column_mask import ColumnMask
from tests.emulator.tcgen05.descriptors import SharedDescriptor
from tests.emulator.tcgen05.formats import Bytes, Floats, Words
from tests.emulator.tcgen05.instruction import MmaInstruction
from tests.emulator.tcgen05.mma import multiply_accumulate, scale_operand
from tests.emulator.tcgen05.operands import OperandShape, byte_addresses, read_operand
from tests.emulator.tcgen05.tensor_memory_layout import (
    Address,
    Block,
    a_blocks,
    accumulator_blocks,
    disabled_lanes,
    read_a,
    read_block_matrix,
    read_scale_bytes,
    scale_cells,
    scale_regions,
    write_block_matrix,
)
from tests.emulator.tcgen05.transfer import shift_down


class CtaMemory(NamedTuple):
    """One CTA's shared memory (uint8, a multiple of 16) and tensor memory (uint32 [128, 512])."""

    shared: Bytes
    tensor: Words


@dataclass(frozen=True, slots=True)
class Mma:
    """A tcgen05.mma with its operands.

    Attributes:
        instruction: shape and formats.
        d: address of D.
        a: A in shared memory, or the address of A in tensor memory.
        b: B in shared memory.
        accumulate: enable-input-d: whether the product is added to D.
        scales_a, scales_b: addresses of the block scales, for block-scaled kinds.
        disable_output_lane: words of the lane mask, or empty.
        scale_input_d: 0 to 15: D is multiplied by 2^-scale_input_d before the addition.
        column_mask: zero-column mask (``.ws``).
        a_shift: ``.ashift``: whether A is shifted after its use (CUTLASS).
        collector: ``a::fill`` ... ``b3::discard``, or None; changes no result.
    """

    instruction: MmaInstruction
    d: Address
    a: SharedDescriptor | Address
    b: SharedDescriptor
    accumulate: bool
    scales_a: Address | None = None
    scales_b: Address | None = None
    disable_output_lane: tuple[int, ...] = ()
    scale_input_d: int = 0
    column_mask: ColumnMask | None = None
    a_shift: bool = False
    collector: str | None = None


@lru_cache(maxsize=1024)
def a_shape(instruction: MmaInstruction) -> OperandShape:
    """One CTA's part of A in shared memory."""
    return OperandShape(
        instruction.a_rows,
        instruction.k,
        instruction.a,
        instruction.transpose_a,
        instruction.kind.padded,
    )


@lru_cache(maxsize=1024)
def b_shape(instruction: MmaInstruction, shift: int = 0) -> OperandShape:
    """One CTA's part of B in shared memory, from column `shift` on."""
    return OperandShape(
        instruction.b_rows,
        instruction.k,
        instruction.b,
        instruction.transpose_b,
        instruction.kind.padded,
        shift,
    )


def check(mma: Mma) -> None:
    """Refuse combinations of qualifiers and operands that PTX ISA 9.7.16.10.9 does not list.

    Raises:
        IllegalInstruction: the combination is not listed; the message names it.
    """
    instruction = mma.instruction
    kind = instruction.kind.name
    scaled = "A" * (mma.scales_a is not None) + "B" * (mma.scales_b is not None)
    if scaled != "AB" * instruction.kind.block_scaled:
        raise IllegalInstruction(
            f"kind::{kind} with block scales of {scaled or 'neither'}: "
            + ("both are" if instruction.kind.block_scaled else "none is")
            + " accepted (PTX ISA 9.7.16.10.9.1)"
        )
    if mma.disable_output_lane and (instruction.kind.block_scaled or instruction.weight_stationary):
        raise IllegalInstruction(
            f"disable-output-lane with kind::{kind}{'.ws' * instruction.weight_stationary}: neither"
            " block-scaled kinds nor .ws take it (PTX ISA 9.7.16.10.9)"
        )
    if mma.column_mask is not None and not instruction.weight_stationary:
        raise IllegalInstruction(
            "a zero-column mask without .ws: only tcgen05.mma.ws takes one (PTX ISA 9.7.16.10.9.3)"
        )
    if mma.a_shift and (not isinstance(mma.a, Address) or instruction.m not in (128, 256)):
        raise IllegalInstruction(
            f".ashift with M = {instruction.m} and A in"
            f" {'tensor' if isinstance(mma.a, Address) else 'shared'} memory: accepted are M = 128"
            " or 256 with A in tensor memory (PTX ISA 9.7.16.10.9.1)"
        )
    if mma.collector is not None:
        _check_collector(mma.collector, mma)


def _check_collector(collector: str, mma: Mma) -> None:
    buffer, _, use = collector.partition("::")
    buffers = ("b0", "b1", "b2", "b3") if mma.instruction.weight_stationary else ("a",)
    if buffer not in buffers or use not in ("fill", "use", "lastuse", "discard"):
        raise IllegalInstruction(
            f".collector::{collector}: accepted are fill, use, lastuse and discard of"
            f" {', '.join(buffers)} (PTX ISA 9.7.16.10.9)"
        )
    if mma.a_shift and use in ("fill", "use"):
        raise IllegalInstruction(
            f".ashift with .collector::{collector}: neither fill nor use is accepted with it"
            " (PTX ISA 9.7.16.10.9.1)"
        )


def _read_b(mma: Mma, ctas: Sequence[CtaMemory]) -> Floats:
    mask = mma.column_mask
    shape = b_shape(mma.instruction, mask.shift if mask else 0)
    parts = [read_operand(cta.shared, mma.b, shape) for cta in ctas]
    b = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if mask is not None and mask.zero is not None:
        b = np.where(mask.zero[:, None], np.float32(0), b)
    return b


def execute(mma: Mma, ctas: Sequence[CtaMemory]) -> None:
    """Perform the instruction on the memories of the participating CTAs, rank 0 first.

    Raises:
        IllegalInstruction, UnknownInstruction, OutOfBounds: errors of the called functions.
        IndexError: an operand lies beyond the end of shared memory.
    """
    check(mma)
    instruction = mma.instruction
    if len(ctas) != instruction.cta_group:
        raise ValueError(f"{len(ctas)} CTAs for cta_group::{instruction.cta_group}")
    blocks = accumulator_blocks(instruction, mma.d)
    disabled: Sequence[npt.NDArray[np.bool_] | None] = (None, None)
    if mma.disable_output_lane:
        disabled = disabled_lanes(mma.disable_output_lane, instruction.cta_group)
    b = _read_b(mma, ctas)
    scaled_b: Floats | None = None
    scales_before: Bytes = np.empty(0, np.uint8)
    results = []
    for cta in ctas:
        if isinstance(mma.a, Address):
            a: Floats = read_a(cta.tensor, instruction, mma.a, mma.d.lane)
        else:
            a = read_operand(cta.shared, mma.a, a_shape(instruction))
        factor = b
        if mma.scales_a is not None and mma.scales_b is not None:
            scale_format = instruction.scale_format
            scales = read_scale_bytes(cta.tensor, instruction, mma.scales_a, for_a=True)
            a = scale_operand(a, scales, scale_format)
            scales = read_scale_bytes(cta.tensor, instruction, mma.scales_b, for_a=False)
            if scaled_b is None or not np.array_equal(scales, scales_before):
                scaled_b = scale_operand(b, scales, scale_format)
                scales_before = scales
            factor = scaled_b
        before = None
        if mma.accumulate:
            before = read_block_matrix(cta.tensor, blocks, instruction.a_rows, instruction.n)
        results.append(multiply_accumulate(instruction, a, factor, before, mma.scale_input_d))
    for cta, words, lanes in zip(ctas, results, disabled, strict=False):
        write_block_matrix(cta.tensor, blocks, words, lanes)
        if mma.a_shift and isinstance(mma.a, Address):
            for lane in range(0, 128, 32):
                shift_down(cta.tensor, Address(lane, mma.a.column))


class Footprint(NamedTuple):
    """Footprint of a tcgen05.mma in each of its CTAs (the same in both).

    Attributes:
        shared_reads: arrays of byte addresses in shared memory.
        tensor_reads: (lanes, columns) pairs that index tensor memory.
        tensor_writes: blocks of D.
    """

    shared_reads: tuple[npt.NDArray[np.intp], ...]
    tensor_reads: tuple[tuple[npt.NDArray[np.intp] | slice, npt.NDArray[np.intp] | slice], ...]
    tensor_writes: tuple[Block, ...]


def footprint(mma: Mma) -> Footprint:
    """The cells that :func:`execute` reads and writes, with the same errors.

    Lanes that disable-output-lane excludes are among the writes. Padding of sub-byte operands is
    not among the reads.
    """
    check(mma)
    instruction = mma.instruction
    blocks = accumulator_blocks(instruction, mma.d)
    shift = mma.column_mask.shift if mma.column_mask else 0
    shared = [byte_addresses(mma.b, b_shape(instruction, shift))]
    tensor: list[tuple[npt.NDArray[np.intp] | slice, npt.NDArray[np.intp] | slice]] = []
    if isinstance(mma.a, Address):
        tensor += [(x.lanes, x.columns) for x in a_blocks(instruction, mma.a, mma.d.lane)]
    else:
        shared.append(byte_addresses(mma.a, a_shape(instruction)))
    for address, for_a in ((mma.scales_a, True), (mma.scales_b, False)):
        if address is not None:
            tensor += [
                scale_cells(region) for region in scale_regions(instruction, address, for_a=for_a)
            ]
    if mma.accumulate:
        tensor += [(x.lanes, x.columns) for x in blocks]
    return Footprint(tuple(shared), tuple(tensor), blocks)
