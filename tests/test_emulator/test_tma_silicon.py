"""Tile copies, reductions, descriptors and tensormap.replace as recorded on an H200."""

import base64
import hashlib
import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.emulator.findings import IllegalInstruction, Misaligned
from tests.emulator.tma.box import place
from tests.emulator.tma.element_type import BY_DRIVER, ElementType
from tests.emulator.tma.replace import replace_field
from tests.emulator.tma.swizzle import Swizzle
from tests.emulator.tma.tensor_map import Interleave, TensorMap, check, decode, encode
from tests.emulator.tma.tile import Direction, locate

VECTORS = Path(__file__).parent / "vectors"
RECORDED = json.loads((VECTORS / "tma_h200.json").read_text())
DRIVER = json.loads((VECTORS / "tensormaps.json").read_text())
NAMES = {
    "u8": ElementType.U8,
    "u16": ElementType.U16,
    "u32": ElementType.U32,
    "i32": ElementType.S32,
    "u64": ElementType.U64,
    "i64": ElementType.S64,
    "f16": ElementType.F16,
    "f32": ElementType.F32,
    "f64": ElementType.F64,
    "bf16": ElementType.BF16,
    "f32_ftz": ElementType.F32_FTZ,
    "tf32": ElementType.TF32,
    "tf32_ftz": ElementType.TF32_FTZ,
    "u4_align8": ElementType.U4_ALIGN8B,
    "u4_align16": ElementType.U4_ALIGN16B,
    "u6_align16": ElementType.U6_ALIGN16B,
}
BASE = 0x7F40_0000_0000
WINDOW = 1024  # shared address of the recorded bytes


@cache
def input_bytes(name: str, nbytes: int) -> bytes:
    if name == "ramp":
        return np.arange(nbytes // 2).astype(np.uint16).tobytes()
    stored = zlib.decompress(base64.b64decode(RECORDED["inputs"][name]))
    return stored[:nbytes].ljust(nbytes, b"\0")


def tensor_map(case: dict[str, Any]) -> TensorMap:
    return TensorMap(
        element_type=NAMES[case["type"]],
        address=case.get("address", BASE),
        dims=tuple(case["dims"]),
        strides=tuple(case["strides"]),
        box=tuple(case["box"]),
        element_strides=tuple(case["steps"]),
        interleave=Interleave(case.get("interleave", 0)),
        swizzle=Swizzle(case["swizzle"]),
        l2_promotion=case.get("promotion", 0),
        nan_fill=bool(case["fill"]),
    )


class Global:
    def __init__(self, name: str, nbytes: int = 1 << 16) -> None:
        self.data = np.frombuffer(input_bytes(name, nbytes), np.uint8).copy()

    def fetch(self, address: int, nbytes: int) -> np.ndarray:
        start = address - BASE
        assert 0 <= start <= start + nbytes <= self.data.size
        return self.data[start : start + nbytes]


def digest(data: np.ndarray) -> str:
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]


def name_of(case: dict[str, Any]) -> str:
    shape = case["map"]
    text = [shape["type"], shape["box"], case["coordinates"], f"swizzle{shape['swizzle']}"]
    return "-".join(str(part) for part in text).replace(" ", "")


@pytest.mark.parametrize("case", RECORDED["loads"], ids=name_of)
def test_load(case):
    shape = decode(encode(tensor_map(case["map"]), 90), 90)
    memory = Global(case["global"])
    shared = np.full(case["bytes"], 0xCD, np.uint8)
    tile = locate(shape, tuple(case["coordinates"]))
    assert tile.box.transaction_bytes == case["transaction"]
    where = place(shape, tile.box, WINDOW + case["offset"])
    where.scatter(tile.read(memory.fetch), shared[case["offset"] :][: where.nbytes])
    assert digest(shared) == case["digest"]


def stored(case, operation=None):
    shape = decode(encode(tensor_map(case["map"]), 90), 90)
    memory = Global(case["global"])
    shared = np.frombuffer(input_bytes(case["shared"], case["bytes"]), np.uint8)
    direction = Direction.STORE if operation is None else Direction.REDUCE
    tile = locate(shape, tuple(case["coordinates"]), direction)
    where = place(shape, tile.box, WINDOW + case["offset"])
    box = where.gather(shared[case["offset"] :][: where.nbytes])
    if operation is None:
        tile.write(box, memory.fetch)
    else:
        tile.reduce(operation, box, memory.fetch)
    return digest(memory.data[: case["keep"]])


@pytest.mark.parametrize("case", RECORDED["stores"], ids=name_of)
def test_store(case):
    assert stored(case) == case["digest"]


@pytest.mark.parametrize(
    "case",
    RECORDED["reductions"],
    ids=lambda c: f"{c['operation']}-{c['map']['type']}-{c['global']}",
)
def test_reduction(case):
    assert stored(case, case["operation"]) == case["digest"]


@pytest.mark.parametrize(
    "case", RECORDED["refused"], ids=lambda c: f"{c['direction']}-{c['operation']}-{name_of(c)}"
)
def test_refused(case):
    """Calls that failed on the device: an illegal instruction, or a misaligned address."""
    shape = tensor_map(case["map"])
    memory = Global("ramp")

    def attempt() -> None:
        tile = locate(shape, tuple(case["coordinates"]), Direction(case["direction"]))
        where = place(shape, tile.box, WINDOW + case["offset"])
        box = where.gather(np.zeros(where.nbytes, np.uint8))
        if case["direction"] == "reduce":
            tile.reduce(case["operation"], box, memory.fetch)

    error, message = {
        "illegal": (IllegalInstruction, "accepted|not negative|load only"),
        "misaligned": (Misaligned, "multiples of 128"),
    }[case["error"]]
    with pytest.raises(error, match=message):
        attempt()


@pytest.mark.parametrize("number", range(len(RECORDED["encodings"])))
def test_driver_checks(number):
    case = RECORDED["encodings"][number]
    if case["interleave"] > 2 or case["swizzle"] > 6 or case["promotion"] > 3 or case["fill"] > 1:
        assert case["result"] == 1
        return
    shape = tensor_map(case)
    if case["result"]:
        with pytest.raises(IllegalInstruction, match=r"accepted|needs compute capability"):
            encode(shape, 90)
        return
    descriptor = encode(shape, 90)
    words = np.frombuffer(descriptor, np.uint64)
    assert [hex(word) for word in words[:10]] == case["words"]
    assert not words[10:].any()
    assert decode(descriptor, 90) == shape


@pytest.mark.parametrize("number", range(len(DRIVER)))
def test_recorded_tensor_maps(number):
    case = DRIVER[number]
    words = [int(word, 16) for word in case["words"]]
    if case.get("swz", 0) > 6:
        assert case["result"] == 1
        return
    shape = TensorMap(
        element_type=NAMES[case["dt"]],
        address=case["addr"],
        dims=tuple(case["dims"]),
        strides=tuple(case["strides"]),
        box=tuple(case["box"]),
        element_strides=tuple(case["es"]),
        interleave=Interleave(case.get("inter", 0)),
        swizzle=Swizzle(case.get("swz", 0)),
        l2_promotion=case.get("l2", 0),
        nan_fill=bool(case.get("oob", 0)),
    )
    if case["result"]:
        with pytest.raises(IllegalInstruction, match=r"needs compute capability 10\.0"):
            encode(shape, 90)
        return
    descriptor = np.array(words, np.uint64).tobytes()
    assert encode(shape, 90) == descriptor
    assert decode(descriptor, 90) == shape


REPLACED = np.array([int(word, 16) for word in RECORDED["replaced"]], np.uint64)


@pytest.mark.parametrize(
    "case", RECORDED["replacements"], ids=lambda c: f"{c['field']}-{c['ord']}-{c['value']}"
)
def test_replace(case):
    before = REPLACED.tobytes()
    after = REPLACED.copy()
    for index, word in case["words"]:
        after[index] = int(word, 16)
    field, value, ordinal = case["field"], case["value"], case["ord"]
    if field == "global_stride" and value % 16:
        # The device drops the low bits; the emulator reports a fault of the kernel.
        with pytest.raises(IllegalInstruction, match=r"multiples of 16"):
            replace_field(before, field, value, ordinal)
        value -= value % 16
    assert replace_field(before, field, value, ordinal) == after.tobytes()


def test_every_element_type_is_named():
    assert set(NAMES.values()) == set(ElementType)
    assert {kind.driver for kind in NAMES.values()} == set(BY_DRIVER) == set(range(16))


def test_newer_swizzles_need_a_newer_device():
    case = next(c for c in DRIVER if c.get("swz") == 4)
    shape = TensorMap(
        ElementType.F16, case["addr"], (4096, 512), (8192,), (64, 128), (1, 1), swizzle=Swizzle(4)
    )
    check(shape, 100)
    with pytest.raises(IllegalInstruction, match=r"B128_ATOM_32B, which needs compute capability"):
        check(shape, 90)
