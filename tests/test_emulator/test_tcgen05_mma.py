from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emulator.findings import IllegalInstruction, OutOfBounds, UnknownInstruction
from tests.emulator.tcgen05.column_mask import decode_column_mask
from tests.emulator.tcgen05.descriptors import decode_shared_descriptor
from tests.emulator.tcgen05.execute import CtaMemory, Mma, execute, footprint
from tests.emulator.tcgen05.instruction import decode_instruction
from tests.emulator.tcgen05.tensor_memory_layout import (
    Address,
    disabled_lanes,
    split_address,
    split_scale_address,
)
from tests.test_emulator import tcgen05_oracle as oracle

SHARED = 64 * 1024
B_START = 32 * 1024
# Columns of tensor memory with A and the scales; D begins at 0.
A_COLUMN, SFA_COLUMN, SFB_COLUMN = 300, 320, 336

F8F6F4 = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
KINDS: dict[str, tuple[int, dict[str, int], dict[str, int]]] = {
    "f16": (16, {"f16": 0, "bf16": 1}, {"f16": 0, "f32": 1}),
    "tf32": (8, {"tf32": 2}, {"f32": 1}),
    "f8f6f4": (32, F8F6F4, {"f16": 0, "f32": 1}),
    "i8": (32, {"u8": 0, "s8": 1}, {"s32": 2}),
    "mxf8f6f4": (32, F8F6F4, {"f32": 0}),
    "mxf4": (64, {"e2m1": 1}, {"f32": 0}),
    "mxf4nvf4": (64, {"e2m1": 1}, {"f32": 0}),
}
SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")


@dataclass(frozen=True)
class Case:
    """One tcgen05.mma; the fields are those of the instruction."""

    kind: str
    a: str
    b: str
    d: str
    m: int
    n: int
    group: int = 1
    ws: bool = False
    a_mode: int = 2
    b_mode: int = 2
    transpose_a: bool = False
    transpose_b: bool = False
    negate_a: bool = False
    negate_b: bool = False
    a_in_tensor: bool = False
    accumulate: bool = True
    lane: int = 0
    scale_vector: str | None = None
    ue8m0: bool = True
    id_a: int = 0
    id_b: int = 0
    scale_input_d: int = 0
    saturate: bool = False
    disabled: tuple[int, ...] = ()
    special: bool = False

    @property
    def k(self) -> int:
        return KINDS[self.kind][0]

    @property
    def padded(self) -> bool:
        return self.kind.endswith("f8f6f4")

    @property
    def scales(self) -> int:
        if self.kind not in SCALED:
            return 0
        names = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4, "block16": 4}
        if self.scale_vector in names:
            return names[self.scale_vector]
        return 1 if self.kind == "mxf8f6f4" else 2

    @property
    def word(self) -> int:
        _, operands, accumulators = KINDS[self.kind]
        word = self.saturate << 3 | operands[self.a] << 7 | operands[self.b] << 10
        word |= self.negate_a << 13 | self.negate_b << 14
        word |= self.transpose_a << 15 | self.transpose_b << 16
        word |= self.n // 8 << 17 | self.m // 16 << 24
        if self.kind in SCALED:
            return word | self.ue8m0 << 23 | self.id_a << 29 | self.id_b << 4
        return word | accumulators[self.d] << 4


def compact(start: int, rows: int, k: int, name: str, mode: int, mn: bool, padded: bool) -> Any:
    """Placement without gaps, as in CUTLASS's kernels."""
    row_bytes = 16 * oracle.SWIZZLES[mode][0]
    slot = 8 if padded else oracle.BITS[name]
    if not mn:
        leading = 16 if mode else rows * 16
        return oracle.Placement(start, leading, 8 * row_bytes, mode, name, False, padded)
    atom = (4 if mode == 1 else 8) * row_bytes
    across = atom * -(-rows * slot // 8 // row_bytes)
    leading, stride = (across, atom) if mode == 0 else (atom, across)
    return oracle.Placement(start, leading, stride, mode, name, True, padded)


def d_cell(case: Case, row: int, column: int) -> tuple[int, int, int]:
    """CTA, lane and column of D[row, column] (PTX ISA 9.7.16.10.5, layouts A to G)."""
    half, quarter = case.n // 2, case.n // 4
    if case.ws and case.m == 32:
        return 0, row + 32 * (column // quarter), column % quarter
    if case.ws and case.m == 64:
        return 0, row + 64 * (column // half), column % half
    if case.group == 2 and case.m == 128:
        return row // 64, row % 64 + 64 * (column // half), column % half
    if case.group == 2:
        return row // 128, row % 128, column
    if case.m == 64:
        return 0, case.lane + row // 16 * 32 + row % 16, column
    return 0, row, column


class Machine:
    """Memories filled for a case, and the expected D in float64."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        rng = self.rng = np.random.default_rng(seed)
        group, k = case.group, case.k
        self.shared = [rng.integers(0, 256, SHARED, dtype=np.uint8) for _ in range(group)]
        self.tensor = [rng.integers(0, 2**32, (128, 512), dtype=np.uint32) for _ in range(group)]
        a_codes = oracle.random_codes(rng, case.m, k, case.a, special=case.special)
        b_codes = oracle.random_codes(rng, case.n, k, case.b, special=case.special)
        rows, columns = case.m // group, case.n // group
        a_at = compact(0, rows, k, case.a, case.a_mode, case.transpose_a, case.padded)
        b_at = compact(B_START, columns, k, case.b, case.b_mode, case.transpose_b, case.padded)
        for cta in range(group):
            if case.a_in_tensor:
                self.put_a(cta, a_codes[rows * cta : rows * (cta + 1)])
            else:
                a_at.put(self.shared[cta], a_codes[rows * cta : rows * (cta + 1)])
            b_at.put(self.shared[cta], b_codes[columns * cta : columns * (cta + 1)])
        a = oracle.values(a_codes, case.a) * (-1 if case.negate_a else 1)
        b = oracle.values(b_codes, case.b) * (-1 if case.negate_b else 1)
        if case.scales:
            a = a * self.put_scales(case.m, True)
            b = b * self.put_scales(case.n, False)
        self.a, self.b = a, b
        self.before = self.put_d()
        self.mma = Mma(
            decode_instruction(
                case.word,
                case.kind,
                cta_group=group,
                weight_stationary=case.ws,
                scale_vector=case.scale_vector,
            ),
            Address(case.lane, 0),
            Address(case.lane, A_COLUMN)
            if case.a_in_tensor
            else decode_shared_descriptor(a_at.word),
            decode_shared_descriptor(b_at.word),
            case.accumulate,
            Address(0, SFA_COLUMN) if case.scales else None,
            Address(0, SFB_COLUMN) if case.scales else None,
            case.disabled,
            case.scale_input_d,
        )

    def put_a(self, cta: int, codes: np.ndarray) -> None:
        case = self.case
        bits, shift = oracle.BITS[case.a], 0
        if case.padded:
            # 00xxxx00 and 0xxxxxx0.
            shift, bits = {4: 2, 6: 1, 8: 0}[bits], 8
        per_word = 32 // bits
        for row, line in enumerate(codes):
            lanes = [row]
            if case.group == 1 and case.m == 64 and not case.ws:
                lanes = [case.lane + row // 16 * 32 + row % 16]
            elif case.group == 2 and case.m == 128:
                lanes = [row, row + 64]
            for i in range(8):
                word = 0
                for j, code in enumerate(line[i * per_word : (i + 1) * per_word]):
                    word |= int(code) << (shift + bits * j)
                for lane in lanes:
                    self.tensor[cta][lane, A_COLUMN + i] = word

    def put_scales(self, rows: int, for_a: bool) -> np.ndarray:
        """Write the scales where the hardware reads them; returns the scales spread over k."""
        case = self.case
        low, high = (120, 134) if case.ue8m0 else (0x20, 0x60)
        codes = self.rng.integers(low, high, (rows, case.scales))
        column = SFA_COLUMN if for_a else SFB_COLUMN
        first = case.id_a if for_a else case.id_b
        two_by_two = case.group == 2 and case.m == 128
        for cta in range(case.group):
            cells = self.tensor[cta].view(np.uint8).reshape(128, 512, 4)
            for row in range(rows):
                local, partitions = row, range(4)
                if for_a:
                    local = row - case.m // case.group * cta
                    if not 0 <= local < case.m // case.group:
                        continue
                elif two_by_two:
                    half = case.n // 2
                    local, partitions = row % half, range(2 * (row // half), 2 * (row // half) + 2)
                for partition in partitions:
                    cell = cells[32 * partition + local % 32, column + local // 32]
                    cell[first : first + case.scales] = codes[row]
        table = np.array([oracle.scale_value(code, case.ue8m0) for code in range(255)])
        return np.repeat(table[codes], case.k // case.scales, axis=1)

    def cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        places = [
            [d_cell(self.case, row, column) for column in range(self.case.n)]
            for row in range(self.case.m)
        ]
        return tuple(np.array(places).transpose(2, 0, 1))  # type: ignore[return-value]

    def put_d(self) -> np.ndarray:
        case = self.case
        shape = (case.m, case.n)
        if case.d == "s32":
            numbers = self.rng.integers(-(2**31), 2**31, shape)
            words = numbers.astype(np.int32).view(np.uint32)
        elif case.d == "f16":
            halves = (self.rng.standard_normal(shape) * 8).astype(np.float16)
            junk = self.rng.integers(0, 2**16, shape, dtype=np.uint32) << 16
            words, numbers = halves.view(np.uint16) | junk, halves.astype(np.float64)
        else:
            floats = (self.rng.standard_normal(shape) * 8).astype(np.float32)
            words, numbers = floats.view(np.uint32), floats.astype(np.float64)
        cta, lane, column = self.place = self.cells()
        for rank in range(case.group):
            here = cta == rank
            self.tensor[rank][lane[here], column[here]] = words[here]
        return numbers

    def run(self) -> np.ndarray:
        """Matrix D after the MMA, uint32 [m, n]; checks that nothing else has changed."""
        before = [tensor.copy() for tensor in self.tensor]
        shared = [memory.copy() for memory in self.shared]
        execute(self.mma, [CtaMemory(s, t) for s, t in zip(self.shared, self.tensor, strict=True)])
        words = np.empty((self.case.m, self.case.n), np.uint32)
        cta, lane, column = self.place
        for rank in range(self.case.group):
            here = cta == rank
            words[here] = self.tensor[rank][lane[here], column[here]]
            before[rank][lane[here], column[here]] = words[here]
            np.testing.assert_array_equal(self.tensor[rank], before[rank])
            np.testing.assert_array_equal(self.shared[rank], shared[rank])
        return words

    def check(self) -> None:
        case = self.case
        old = np.empty((case.m, case.n), np.uint32)
        cta, lane, column = self.place
        for rank in range(case.group):
            here = cta == rank
            old[here] = self.tensor[rank][lane[here], column[here]]
        words = self.run()
        off = np.zeros((case.m, case.n), dtype=bool)
        if case.disabled:
            flat = [bool(word >> bit & 1) for word in case.disabled for bit in range(32)]
            off = np.array(flat)[128 * cta + lane]
            np.testing.assert_array_equal(words[off], old[off])
        addend = self.before * (2.0**-case.scale_input_d if case.accumulate else 0.0)
        with np.errstate(all="ignore"):
            expected = self.a @ self.b.T + addend
            size = np.abs(self.a) @ np.abs(self.b).T + np.abs(addend)
        if case.d == "s32":
            limit = np.clip(expected, -(2**31), 2**31 - 1) if case.saturate else expected
            number = limit.astype(np.int64) & 0xFFFFFFFF
            np.testing.assert_array_equal(words[~off], number.astype(np.uint32)[~off])
            return
        if case.d == "f16":
            got = words.astype(np.uint16).view(np.float16).astype(np.float64)
            assert not (words >> 16)[~off].any()
            with np.errstate(over="ignore", invalid="ignore"):
                error = np.abs(np.spacing(expected.astype(np.float16)).astype(np.float64))
        else:
            got = words.view(np.float32).astype(np.float64)
            error = np.zeros_like(size)
        finite = np.isfinite(expected) & np.isfinite(got) & ~off
        if not case.special:
            assert finite[~off].all()
        np.testing.assert_array_less(
            np.abs(got[finite] - expected[finite]), (error + size * 2.0**-20 + 1e-30)[finite]
        )
        unusual = ~np.isfinite(expected) & ~off
        np.testing.assert_array_equal(got[unusual], expected[unusual])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Legal instructions of every kind, form, shape, major-ness and swizzle."""
    kind = draw(st.sampled_from(list(KINDS)))
    _, operands, accumulators = KINDS[kind]
    a, b = (draw(st.sampled_from(list(operands))) for _ in range(2))
    d = draw(st.sampled_from(list(accumulators)))
    if d == "f16" and kind == "f16":
        a = b = "f16"
    scaled = kind in SCALED
    form = draw(st.sampled_from([1, 2] if scaled else [1, 2, "ws"]))
    group = 2 if form == 2 else 1
    transpose = st.booleans() if kind not in ("mxf4", "mxf4nvf4") else st.just(False)
    transpose_a, transpose_b = draw(transpose), draw(transpose)
    if form == "ws":
        m, n = draw(st.sampled_from([32, 64, 128])), draw(st.sampled_from([64, 128, 256]))
    elif form == 2:
        step = 32 if kind == "i8" or (transpose_b and oracle.BITS[b] <= 8) else 16
        m = draw(st.sampled_from([128, 256]))
        n = step * draw(st.integers(1, 256 // step))
    else:
        step = 16 if transpose_b and oracle.BITS[b] <= 8 else 8
        m = 128 if scaled else draw(st.sampled_from([64, 128]))
        n = step * draw(st.integers(1, 256 // step))
        if kind == "i8" and n > 32:
            n = n // 16 * 16
    a_in_tensor = draw(st.booleans()) and (form != "ws" or m == 128)
    transpose_a = transpose_a and not a_in_tensor
    modes = {
        transposed: [1] if kind == "tf32" and transposed else [0, 2, 4, 6] for transposed in (0, 1)
    }
    vectors: dict[str, list[str | None]] = {
        "mxf8f6f4": [None, "scale_vec::1X", "block32"],
        "mxf4": [None, "scale_vec::2X", "block32"],
        "mxf4nvf4": ["scale_vec::2X", "block32", "scale_vec::4X", "block16"],
    }
    vector = draw(st.sampled_from(vectors[kind])) if scaled else None
    case = Case(
        kind,
        a,
        b,
        d,
        m,
        n,
        group,
        form == "ws",
        draw(st.sampled_from(modes[transpose_a])),
        draw(st.sampled_from(modes[transpose_b])),
        transpose_a,
        transpose_b,
        kind != "i8" and draw(st.booleans()),
        kind != "i8" and draw(st.booleans()),
        a_in_tensor,
        draw(st.booleans()),
        draw(st.sampled_from([0, 16])) if form == 1 and m == 64 else 0,
        vector,
        saturate=kind == "i8" and draw(st.booleans()),
        scale_input_d=draw(st.integers(0, 15)) if kind in ("f16", "tf32") else 0,
        special=draw(st.integers(0, 4)) == 0,
    )
    ids = {0: [0], 1: [0, 1, 2, 3], 2: [0, 2], 4: [0]}[case.scales]
    case = replace(case, id_a=draw(st.sampled_from(ids)), id_b=draw(st.sampled_from(ids)))
    if case.scales == 4:
        case = replace(case, ue8m0=draw(st.booleans()))
    if not scaled and not case.ws and draw(st.booleans()):
        masks = st.tuples(*[st.integers(0, 2**32 - 1)] * (4 * group))
        case = replace(case, disabled=draw(masks))
    return case


@given(case=cases(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=500, deadline=None)
def test_every_instruction_against_float64(case: Case, seed: int) -> None:
    Machine(case, seed).check()


# Each class of D, A and scale layout once, independently of the random cases.
@pytest.mark.parametrize(
    "case",
    [
        Case(
            "mxf4nvf4", "e2m1", "e2m1", "f32", 128, 256, scale_vector="scale_vec::4X", ue8m0=False
        ),
        Case("mxf4nvf4", "e2m1", "e2m1", "f32", 128, 192, scale_vector="block16", ue8m0=False),
        Case("mxf4nvf4", "e2m1", "e2m1", "f32", 128, 8, scale_vector="scale_vec::2X", id_a=2),
        Case("mxf4nvf4", "e2m1", "e2m1", "f32", 256, 256, 2, scale_vector="scale_vec::4X"),
        Case("mxf4nvf4", "e2m1", "e2m1", "f32", 128, 256, 2, scale_vector="scale_vec::4X"),
        Case("mxf8f6f4", "e4m3", "e2m1", "f32", 128, 80, 2, id_a=3, id_b=1),
        Case("mxf8f6f4", "e3m2", "e5m2", "f32", 128, 128, a_in_tensor=True),
        Case("mxf4", "e2m1", "e2m1", "f32", 256, 16, 2, a_in_tensor=True),
        Case("f16", "f16", "f16", "f16", 64, 24, lane=16, a_in_tensor=True),
        Case("f16", "bf16", "f16", "f32", 128, 32, 2, a_in_tensor=True),
        Case("f16", "f16", "f16", "f32", 32, 64, ws=True),
        Case("tf32", "tf32", "tf32", "f32", 64, 256, ws=True, transpose_b=True, b_mode=1),
        Case("f8f6f4", "e2m1", "e2m3", "f16", 128, 64, transpose_a=True, transpose_b=True),
        Case("i8", "u8", "s8", "s32", 256, 64, 2, saturate=True),
    ],
)
def test_each_layout(case: Case) -> None:
    Machine(case, 7).check()


def test_enable_input_d_false_does_not_read_d() -> None:
    machine = Machine(Case("f16", "f16", "f16", "f32", 128, 16, accumulate=False), 0)
    machine.tensor[0][:, :16] = 0x7FC00000
    assert np.isfinite(machine.run().view(np.float32)).all()


def test_extreme_scales_do_not_overflow_on_the_way() -> None:
    case = Case("mxf8f6f4", "e4m3", "e4m3", "f32", 128, 8, accumulate=False)
    machine = Machine(case, 0)
    cells = machine.tensor[0].view(np.uint8).reshape(128, 512, 4)
    cells[:, SFA_COLUMN : SFA_COLUMN + 4, 0] = 254  # 2^127
    cells[:, SFB_COLUMN : SFB_COLUMN + 4, 0] = 0  # 2^-127
    scale_a = machine.a / oracle_scales(machine, for_a=True)
    scale_b = machine.b / oracle_scales(machine, for_a=False)
    got = machine.run().view(np.float32)
    np.testing.assert_allclose(got, scale_a @ scale_b.T, rtol=1e-5, atol=1e-4)


def oracle_scales(machine: Machine, *, for_a: bool) -> np.ndarray:
    """Scales of A or B, read back from a machine with the same seed."""
    again = Machine(machine.case, 0)
    column, rows = (SFA_COLUMN, machine.case.m) if for_a else (SFB_COLUMN, machine.case.n)
    cells = again.tensor[0].view(np.uint8).reshape(128, 512, 4)
    codes = [int(cells[row % 32, column + row // 32, 0]) for row in range(rows)]
    return np.array([[oracle.scale_value(code, True)] for code in codes])


def test_nan_scale_makes_its_row_nan() -> None:
    machine = Machine(Case("mxf8f6f4", "e4m3", "e4m3", "f32", 128, 8, accumulate=False), 0)
    cells = machine.tensor[0].view(np.uint8).reshape(128, 512, 4)
    cells[5::32, SFA_COLUMN + 2, 0] = 0xFF
    nan = np.isnan(machine.run().view(np.float32))
    assert nan[69].all()
    assert nan.sum() == 8


@pytest.mark.parametrize("saturate", [False, True])
def test_integer_overflow_wraps_or_saturates(saturate: bool) -> None:
    machine = Machine(Case("i8", "u8", "u8", "s32", 128, 8, saturate=saturate), 0)
    machine.tensor[0][:, :8] = 2**31 - 1
    product = (machine.a @ machine.b.T).astype(np.int64)
    expected = 2**31 - 1 if saturate else (product + 2**31 - 1) & 0xFFFFFFFF
    np.testing.assert_array_equal(machine.run(), np.broadcast_to(expected, (128, 8)))


def test_column_mask_zeroes_and_shifts_b() -> None:
    case = Case("f16", "f16", "f16", "f32", 64, 64, ws=True, accumulate=False)
    machine = Machine(case, 0)
    codes = oracle.random_codes(machine.rng, 80, 16, "f16")
    compact(B_START, 80, 16, "f16", 2, False, False).put(machine.shared[0], codes)
    word = 1 << 39 | 2 << 40 | 3 << 48 | 3 << 56 | 1 << 32
    machine.mma = replace(machine.mma, column_mask=decode_column_mask(word, 64, 64, 8))
    b = oracle.values(codes, "f16")[3:67]
    for column in range(64):
        # First span of each half: three zero columns in the first half, four used columns in the
        # second.
        position = column % 32 % 7
        if position < 3 if column < 32 else position >= 4:
            b[column] = 0
    unshifted = replace(machine.mma, column_mask=None)
    moved, plain = (footprint(mma).shared_reads[0] for mma in (machine.mma, unshifted))
    np.testing.assert_array_equal(moved[:-3], plain[3:])
    got = machine.run().view(np.float32)
    np.testing.assert_allclose(got, machine.a @ b.T, rtol=1e-5, atol=1e-5)


def test_either_cta_of_a_pair_uses_its_own_scales_of_b() -> None:
    case = Case("mxf8f6f4", "e4m3", "e4m3", "f32", 256, 32, 2, accumulate=False)
    plain, doubled = (Machine(case, 0) for _ in range(2))
    doubled.tensor[1].view(np.uint8).reshape(128, 512, 4)[:, SFB_COLUMN, 0] += 1
    expected = plain.run().view(np.float32)
    expected[128:] *= 2
    np.testing.assert_array_equal(doubled.run().view(np.float32), expected)


def test_a_shift_moves_a_after_use() -> None:
    machine = Machine(Case("f16", "f16", "f16", "f32", 128, 16, a_in_tensor=True), 3)
    before = machine.tensor[0][:, A_COLUMN : A_COLUMN + 8].copy()
    machine.mma = replace(machine.mma, a_shift=True)
    expected = machine.a @ machine.b.T + machine.before
    execute(machine.mma, [CtaMemory(machine.shared[0], machine.tensor[0])])
    got = machine.tensor[0][:, :16].view(np.float32)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)
    after = machine.tensor[0][:, A_COLUMN : A_COLUMN + 8]
    for row in range(128):
        np.testing.assert_array_equal(after[row], before[row if row % 32 == 31 else row + 1])


@given(case=cases())
@settings(max_examples=25, deadline=None)
def test_footprint_is_what_matters(case: Case) -> None:
    """Cells outside the footprint have no effect; D's cells are exactly the written cells."""
    first, second = Machine(case, 1), Machine(case, 1)
    touched = footprint(first.mma)
    rng = np.random.default_rng(2)
    written = np.zeros((128, 512), dtype=bool)
    for block in touched.tensor_writes:
        written[block.lanes, block.columns] = True
    expected = np.zeros_like(written)
    _, lane, column = first.place
    expected[lane, column] = True
    np.testing.assert_array_equal(written, expected)
    for rank in range(case.group):
        noise = rng.integers(0, 256, SHARED, dtype=np.uint8)
        for addresses in touched.shared_reads:
            noise[addresses] = second.shared[rank][addresses]
        second.shared[rank][:] = noise
        cells = rng.integers(0, 2**32, (128, 512), dtype=np.uint32)
        for index in touched.tensor_reads:
            cells[index] = second.tensor[rank][index]
        if case.disabled:
            cells[written] = second.tensor[rank][written]
        second.tensor[rank][:] = cells
    np.testing.assert_array_equal(first.run(), second.run())


def simple(**changes: Any) -> Machine:
    return Machine(replace(Case("f16", "f16", "f16", "f32", 128, 16), **changes), 0)


@pytest.mark.parametrize(
    ("case", "changes", "error", "match"),
    [
        (
            {},
            {"d": Address(16, 0)},
            IllegalInstruction,
            r"D at lane 16: layout D \(M = 128\) begins",
        ),
        ({"m": 64}, {"d": Address(32, 0)}, IllegalInstruction, r"layout F \(M = 64\) .* 0 or 16"),
        ({}, {"d": Address(0, 500)}, OutOfBounds, "D takes columns 500 to 515"),
        ({"a_in_tensor": True}, {"a": Address(0, 508)}, OutOfBounds, "A takes columns 508 to 515"),
        ({"a_in_tensor": True}, {"a": Address(32, 300)}, IllegalInstruction, "A at lane 32"),
        (
            {"m": 64, "a_in_tensor": True},
            {"a": Address(16, 300)},
            IllegalInstruction,
            "A at lane 16 and D at lane 0: .* same lane alignment",
        ),
        (
            {"transpose_a": True},
            {"a": Address(0, 300)},
            IllegalInstruction,
            "A in tensor memory is row",
        ),
        (
            {"m": 64, "n": 64, "ws": True},
            {"a": Address(0, 300)},
            UnknownInstruction,
            r"\.ws with M = 64 and A in tensor memory",
        ),
        ({}, {"scales_a": Address(0, 1)}, IllegalInstruction, "block scales of A: none is"),
        ({}, {"disable_output_lane": (0,) * 8}, IllegalInstruction, r"8 words: .* takes 4"),
        (
            {"m": 128, "n": 64, "ws": True},
            {"disable_output_lane": (0,) * 4},
            IllegalInstruction,
            r"disable-output-lane with kind::f16\.ws",
        ),
        (
            {},
            {"a_shift": True},
            IllegalInstruction,
            r"\.ashift with M = 128 and A in shared memory",
        ),
        (
            {"m": 64, "a_in_tensor": True},
            {"a_shift": True},
            IllegalInstruction,
            r"\.ashift with M = 64 and A in tensor memory",
        ),
        (
            {},
            {"column_mask": decode_column_mask(0, 128, 16, 0)},
            IllegalInstruction,
            r"zero-column mask without \.ws",
        ),
        ({}, {"collector": "b0::fill"}, IllegalInstruction, "accepted are fill, use, .* of a "),
        ({}, {"collector": "a::keep"}, IllegalInstruction, r"\.collector::a::keep: accepted are"),
        (
            {"n": 64, "ws": True},
            {"collector": "a::fill"},
            IllegalInstruction,
            "a::fill: .* of b0, b1, b2, b3",
        ),
        (
            {"a_in_tensor": True},
            {"a_shift": True, "collector": "a::use"},
            IllegalInstruction,
            r"\.ashift with \.collector::a::use",
        ),
        ({}, {"scale_input_d": 16}, IllegalInstruction, "scale-input-d 16: accepted are 0 to 15"),
        (
            {"kind": "f8f6f4", "a": "e4m3", "b": "e4m3"},
            {"scale_input_d": 1},
            IllegalInstruction,
            "scale-input-d with kind::f8f6f4",
        ),
        (
            {"kind": "mxf8f6f4", "a": "e4m3", "b": "e4m3"},
            {"scales_b": None},
            IllegalInstruction,
            "block scales of A: both are accepted",
        ),
        (
            {"kind": "mxf8f6f4", "a": "e4m3", "b": "e4m3"},
            {"scales_a": Address(32, 0)},
            IllegalInstruction,
            "block scales of A at lane 32",
        ),
        (
            {"kind": "mxf8f6f4", "a": "e4m3", "b": "e4m3", "n": 256},
            {"scales_b": Address(0, 505)},
            OutOfBounds,
            "block scales of B takes columns 505 to 512",
        ),
    ],
)
def test_bad_operands(
    case: dict[str, Any], changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    machine = simple(**case)
    mma = replace(machine.mma, **changes)
    with pytest.raises(error, match=match):
        execute(mma, [CtaMemory(s, t) for s, t in zip(machine.shared, machine.tensor, strict=True)])


def test_scales_must_be_in_every_subpartition() -> None:
    machine = simple(kind="mxf4", a="e2m1", b="e2m1", id_a=2)
    cells = machine.tensor[0].view(np.uint8).reshape(128, 512, 4)
    cells[64, SFA_COLUMN, 0] ^= 1
    machine.run()
    cells[64, SFA_COLUMN, 2] ^= 1
    with pytest.raises(IllegalInstruction, match="block scales of A differ between subpartitions"):
        machine.run()


def test_negative_ue4m3_scale() -> None:
    machine = simple(kind="mxf4nvf4", a="e2m1", b="e2m1", ue8m0=False, scale_vector="scale_vec::4X")
    machine.tensor[0][::32, SFB_COLUMN] |= 0x80
    with pytest.raises(IllegalInstruction, match="block scale of B has the sign bit set"):
        machine.run()


def test_pair_needs_a_twice() -> None:
    machine = simple(group=2, a_in_tensor=True)
    machine.tensor[1][70, A_COLUMN] ^= 1
    with pytest.raises(IllegalInstruction, match="differs between lanes 0-63 and 64-127"):
        machine.run()


def test_number_of_ctas() -> None:
    machine = simple(group=2)
    with pytest.raises(ValueError, match="1 CTAs for cta_group::2"):
        execute(machine.mma, [CtaMemory(machine.shared[0], machine.tensor[0])])


def test_disabled_lanes() -> None:
    assert disabled_lanes((0, 0, 0, 0), 1) == [None]
    [first, second] = disabled_lanes((0, 0, 0, 0, 1, 0, 0, 1 << 31), 2)
    assert first is None
    assert second is not None
    assert np.flatnonzero(second).tolist() == [0, 127]


def test_addresses() -> None:
    assert split_address(0x0020_0104) == Address(32, 0x104)
    # Bits 30-31 of a scale's address are CUTLASS's byte index.
    assert split_scale_address(0xC000_0010) == Address(0, 16)
    assert split_scale_address(0x0020_0010) == Address(32, 16)


def test_ml_dtypes_agrees_with_the_oracle() -> None:
    """The oracle's formulas agree with a third implementation."""
    for name, dtype in {
        "e2m1": "float4_e2m1fn",
        "e3m2": "float6_e3m2fn",
        "e4m3": "float8_e4m3fn",
    }.items():
        codes = np.arange(1 << oracle.BITS[name])
        theirs = codes.astype(np.uint8).view(getattr(ml_dtypes, dtype)).astype(np.float64)
        np.testing.assert_array_equal(oracle.values(codes, name), theirs)
