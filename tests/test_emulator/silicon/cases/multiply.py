"""mma.sync with every dense shape and type; sums are exact in any order."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from tests.test_emulator.silicon.case import Array, Case, random_array
from tests.test_emulator.silicon.ptx_text import PROLOGUE, module, shared_array

_LANES = 32
_ITEMS = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "f32": np.float32,
}
# K, then types of D, A, B and C.
_FORMS = [
    *((k, f"{d}.f16.f16.{d}") for k in (8, 16) for d in ("f16", "f32")),
    *((k, "f32.bf16.bf16.f32") for k in (8, 16)),
    *((k, "f32.tf32.tf32.f32") for k in (4, 8)),
    *((k, f"s32.{a}.{b}.s32") for k in (16, 32) for a in ("s8", "u8") for b in ("s8", "u8")),
    *((k, f"satfinite.s32.{a}.s8.s32") for k in (16, 32) for a in ("s8", "u8")),
    *(
        (32, f"{d}.{a}.{b}.{d}")
        for d in ("f16", "f32")
        for a in ("e4m3", "e5m2")
        for b in ("e4m3", "e5m2")
    ),
    *((16, f"{d}.e4m3.e5m2.{d}") for d in ("f16", "f32")),
]


def _registers(k: int, types: str) -> tuple[int, int, int, int]:
    d, a, _, c = types.removeprefix("satfinite.").split(".")
    bits = {"f16": 16, "bf16": 16, "tf32": 32}.get(a, 8)
    count = 16 * k * bits // 32 // _LANES
    return 2 if d == "f16" else 4, count, count // 2, 2 if c == "f16" else 4


def _values(seed: str, kind: str, sums: bool) -> Array:
    """Registers of each lane: small whole numbers, or any pattern of an integer type."""
    bits = random_array(seed, (_LANES, 4), "u4")
    if kind == "s32":
        # Near the ends of the type's range, where sums wrap or are clamped.
        return (bits & np.uint32(0x8000_3FFF)) ^ np.where(bits >> 31, 0, 0x7FFF_0000).astype("u4")
    if kind not in _ITEMS:
        return bits
    item = np.dtype(_ITEMS[kind])
    parts = bits.view(f"u{item.itemsize}")
    values = (parts % 17).astype("f4") - 8
    found = values.astype(item).view("u4")
    if kind == "tf32" and not sums:
        found = found | (bits & np.uint32(0x1FFF))  # below tf32's precision
    return found


def cases() -> Iterator[Case]:
    body = [PROLOGUE]
    operands: dict[str, list[Array]] = {"a": [], "b": [], "c": []}
    labels = []
    body += [
        f"mad.wide.u32 %d{n}, %tid_x, 16, %{name};" for n, name in enumerate(("a", "b", "c", "out"))
    ]
    for row, (k, types) in enumerate(_FORMS):
        kinds = types.removeprefix("satfinite.").split(".")
        counts = _registers(k, types)
        names = []
        for n, name in enumerate(("a", "b", "c")):
            operands[name].append(_values(f"{row} {name}", kinds[n + 1], name == "c"))
            registers = [f"%r{8 * n + 8 + i}" for i in range(counts[n + 1])]
            for i, register in enumerate(registers):
                body.append(f"ld.global.b32 {register}, [%d{n}+{row * 512 + 4 * i}];")
            names.append("{" + ", ".join(registers) + "}")
        target = [f"%r{i}" for i in range(counts[0])]
        opcode = f"mma.sync.aligned.m16n8k{k}.row.col.{types}"
        body.append(f"{opcode} {{{', '.join(target)}}}, {', '.join(names)};")
        for i, register in enumerate(target):
            body.append(f"st.global.b32 [%d3+{row * 512 + 4 * i}], {register};")
        labels.append(opcode)
    text = module(["a", "b", "c", "out"], body, declarations=shared_array(128))
    yield Case(
        "dense",
        text.replace(".version 8.6", ".version 8.7"),  # for sums of FP8 products in f16
        {name: np.stack(arrays) for name, arrays in operands.items()},
        {"out": np.zeros((len(_FORMS), _LANES, 4), "u4")},
        rows={"out": labels},
    )
