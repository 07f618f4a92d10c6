"""ldmatrix, stmatrix and mma.sync, against loops from the PTX ISA's tables."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.findings import DivergentExecution, IllegalInstruction, UnknownInstruction
from tests.test_emulator.assemble import global_array, run

RANDOM = np.random.default_rng(7)
# Each lane puts 16 bytes of array 0 into shared memory; %r1 is its row by array 1.
_ROWS = """
    mov.u32 %r80, smem;
    mad.wide.u32 %rd1, %r90, 16, %rd90;
    ld.global.v4.b32 {%r81, %r82, %r83, %r84}, [%rd1];
    mad.lo.u32 %r85, %r90, 16, %r80;
    st.shared.v4.b32 [%r85], {%r81, %r82, %r83, %r84};
    bar.warp.sync -1;
    mad.wide.u32 %rd2, %r90, 4, %rd91;
    ld.global.b32 %r1, [%rd2];
    mad.lo.u32 %r1, %r1, 16, %r80;
"""


def load(form: str, registers: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of shared memory in the order of their lanes, and each lane's registers."""
    data = global_array(RANDOM.integers(0, 256, (32, 16)), np.uint8)
    order = global_array(RANDOM.permutation(32), np.uint32)
    out = global_array(np.zeros((32, registers)), np.uint32)
    names = [f"%r{10 + n}" for n in range(registers)]
    stores = "".join(f"st.global.b32 [%rd3+{4 * n}], {name};" for n, name in enumerate(names))
    body = f"""{_ROWS}
        ldmatrix.sync.aligned.{form} {{{", ".join(names)}}}, [%r1];
        mad.wide.u32 %rd3, %r90, {4 * registers}, %rd92; {stores}
    """
    run(body, data, order, out, shared=512)
    return data[order], out


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("source", ["b8", "b8x16.b6x16_p32", "b8x16.b4x16_p64"])
def test_load_of_16x16(count: int, source: str) -> None:
    """A lane's registers hold four consecutive elements of two rows of the transpose."""
    rows, out = load(f"m16n16.x{count}.trans.shared.{source}", 2 * count)
    for lane in range(32):
        for register in range(2 * count):
            column = lane // 4 + 8 * (register % 2)
            for byte in range(4):
                row = rows[16 * (register // 2) + 4 * (lane % 4) + byte]
                assert out[lane, register] >> 8 * byte & 255 == element(row, column, source)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("source", ["b8x16.b6x16_p32", "b8x16.b4x16_p64"])
def test_load_of_8x16(count: int, source: str) -> None:
    """A lane's register holds four consecutive elements of a row."""
    rows, out = load(f"m8n16.x{count}.shared::cta.{source}", count)
    for lane in range(32):
        for matrix in range(count):
            row = rows[8 * matrix + lane // 4]
            for byte in range(4):
                wanted = element(row, 4 * (lane % 4) + byte, source)
                assert out[lane, matrix] >> 8 * byte & 255 == wanted


def element(row: np.ndarray, place: int, source: str) -> int:
    bits = {"b8": 8, "b8x16.b6x16_p32": 6, "b8x16.b4x16_p64": 4}[source]
    return int.from_bytes(row.tobytes(), "little") >> bits * place & (1 << bits) - 1


@pytest.mark.parametrize("count", [1, 2, 4])
def test_store_of_16x8(count: int) -> None:
    """Lanes hold the fragment of an mma: rows t/4 and t/4 + 8, columns 2 (t%4) and the next."""
    zeros = global_array(np.zeros((32, 16)), np.uint8)
    order = global_array(RANDOM.permutation(32), np.uint32)
    values = global_array(RANDOM.integers(0, 2**32, (32, 4)), np.uint32)
    out = global_array(np.zeros((32, 16)), np.uint8)
    names = ", ".join(f"%r{10 + n}" for n in range(count))
    body = f"""{_ROWS}
        mad.wide.u32 %rd3, %r90, 16, %rd92;
        ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd3];
        stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r1], {{{names}}};
        bar.warp.sync -1;
        ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r85];
        mad.wide.u32 %rd4, %r90, 16, %rd93;
        st.global.v4.b32 [%rd4], {{%r20, %r21, %r22, %r23}};
    """
    run(body, zeros, order, values, out, shared=512)
    expected = np.zeros((32, 16), np.uint8)
    for matrix in range(count):
        for m in range(16):
            for n in range(8):
                lane, byte = 4 * (m % 8) + n // 2, n % 2 + 2 * (m // 8)
                expected[order[8 * matrix + n], m] = values[lane, matrix] >> 8 * byte & 255
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("form", "registers", "error", "message"),
    [
        ("m16n16.x1.shared.b8", 2, IllegalInstruction, ".m16n16 needs .trans"),
        ("m8n16.x1.trans.shared.b8x16.b6x16_p32", 1, IllegalInstruction, "does not take .trans"),
        ("m16n16.x1.trans.shared.b8", 1, IllegalInstruction, "1 registers, accepted 2"),
        ("m16n16.x4.trans.shared.b8", 8, UnknownInstruction, "x4.trans.shared.b8 is not modelled"),
        ("m8n16.x1.shared.b8", 1, UnknownInstruction, "is not modelled"),
        ("m8n8.x1.global.b16", 1, UnknownInstruction, "modifier .global"),
    ],
)
def test_forms_that_do_not_exist(
    form: str, registers: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load(form, registers)


def test_lanes_load_together() -> None:
    body = """
        setp.lt.u32 %p1, %r90, 9; mov.u32 %r1, smem; @%p1 bra AWAY;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1];
    AWAY:
    """
    with pytest.raises(DivergentExecution, match="without lanes"):
        run(body, shared=512)


def multiply(form: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Registers of D after one mma on registers given as (32, count) arrays."""
    names: list[str] = []
    body = ""
    for n, array in enumerate((a, b, c)):
        count = array.shape[1]
        registers = [f"%r{10 * n + 10 + i}" for i in range(count)]
        body += f"mad.wide.u32 %rd{n}, %r90, {4 * count}, %rd9{n};"
        for i, name in enumerate(registers):
            body += f"ld.global.b32 {name}, [%rd{n}+{4 * i}];"
        names.append("{" + ", ".join(registers) + "}")
    count = c.shape[1]
    out = global_array(np.zeros((32, count)), np.uint32)
    target = [f"%r{i}" for i in range(count)]
    body += f"mma.sync.aligned.{form} {{{', '.join(target)}}}, {', '.join(names)};"
    body += f"mad.wide.u32 %rd4, %r90, {4 * count}, %rd93;"
    body += "".join(f"st.global.b32 [%rd4+{4 * i}], {name};" for i, name in enumerate(target))
    run(body, *(global_array(x, np.uint32) for x in (a, b, c)), out)
    return out


def place_a(lane: int, i: int, per_register: int) -> tuple[int, int]:
    """Position (row, k) of element i of lane's A (PTX ISA, the formulas below each figure)."""
    group, member = lane >> 2, lane % 4
    if per_register == 4:  # .m16n8k32, 8 bits
        row = group if i < 4 or 8 <= i < 12 else group + 8
        return row, member * 4 + (i & 3) + (0 if i < 8 else 16)
    if per_register == 2:  # .m16n8k16, 16 bits
        row = group if i < 2 or 4 <= i < 6 else group + 8
        return row, member * 2 + (i & 1) + (0 if i < 4 else 8)
    return group if i in (0, 2) else group + 8, member if i < 2 else member + 4  # .m16n8k8, tf32


def place_b(lane: int, i: int, per_register: int) -> tuple[int, int]:
    """Position (k, column) of element i of lane's B."""
    group, member = lane >> 2, lane % 4
    if per_register == 4:
        return member * 4 + (i & 3) + (0 if i < 4 else 16), group
    if per_register == 2:
        return member * 2 + (i & 1) + (0 if i < 2 else 8), group
    return member + 4 * i, group


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("m16n8k16.row.col.f32.f16.f16.f32", np.float16),
        ("m16n8k16.row.col.f32.bf16.bf16.f32", ml_dtypes.bfloat16),
        ("m16n8k8.row.col.f32.tf32.tf32.f32", np.float32),
        ("m16n8k32.row.col.f32.e4m3.e4m3.f32", ml_dtypes.float8_e4m3fn),
        ("m16n8k32.row.col.s32.s8.s8.s32", np.int8),
    ],
)
def test_product(form: str, dtype: Any) -> None:
    width = np.dtype(dtype).itemsize
    integers = dtype is np.int8
    a = RANDOM.integers(-100, 100, (32, 16 // width)).astype(dtype)
    b = RANDOM.integers(-100, 100, (32, 8 // width)).astype(dtype)
    c = RANDOM.integers(-1000, 1000, (32, 4)).astype(np.int32 if integers else np.float32)
    out = multiply(form, a.view(np.uint32), b.view(np.uint32), c.view(np.uint32))
    left, right = np.zeros((16, 32 // width)), np.zeros((32 // width, 8))
    for lane in range(32):
        for i in range(16 // width):
            left[place_a(lane, i, 4 // width)] = float(a[lane, i])
        for i in range(8 // width):
            right[place_b(lane, i, 4 // width)] = float(b[lane, i])
    product = left @ right
    for lane in range(32):
        for i in range(4):
            row, column = (lane >> 2) + (0 if i < 2 else 8), lane % 4 * 2 + (i & 1)
            assert out.view(c.dtype)[lane, i] == product[row, column] + c[lane, i]


def test_nan_of_a_product_is_canonical() -> None:
    a = np.full((32, 4), 0x7C007C00, np.uint32)  # infinities times zero
    zeros = np.zeros((32, 4), np.uint32)
    out = multiply("m16n8k16.row.col.f32.f16.f16.f32", a, zeros[:, :2], zeros)
    assert (out == 0x7FFFFFFF).all()


@pytest.mark.parametrize(
    "form",
    [
        "m16n8k16.row.row.f32.f16.f16.f32",
        "m16n8k16.row.col.f16.f16.f16.f32",
        "m16n8k16.row.col.f32.f16.bf16.f32",
        "m16n8k32.row.col.f32.f16.f16.f32",
        "m8n8k4.row.col.f64.f64.f64.f64",
        "m16n8k16.row.col.satfinite.f32.f16.f16.f32",
        "sp.m16n8k16.row.col.f32.f16.f16.f32",
    ],
)
def test_other_products_are_refused(form: str) -> None:
    registers = np.zeros((32, 4), np.uint32)
    with pytest.raises(UnknownInstruction, match=r"mma.* is not modelled"):
        multiply(form, registers, registers[:, :2], registers)


def test_registers_of_a_product_are_counted() -> None:
    registers = np.zeros((32, 4), np.uint32)
    with pytest.raises(IllegalInstruction, match=r"\(4, 4, 4, 4\) registers, accepted \(4, 4, 2"):
        multiply("m16n8k16.row.col.f32.f16.f16.f32", registers, registers, registers)
