"""Tensor stores and reductions: clipped boxes, swizzled sources, every operation and type."""

from collections.abc import Iterator

import numpy as np

from tests.test_emulator.silicon.case import Array, Case, TensorMap
from tests.test_emulator.silicon.cases.banks import bank
from tests.test_emulator.silicon.cases.tensor import (
    Places,
    compact,
    element_bytes,
    scattered,
    smem_bytes,
    store,
    tensor_bytes,
)

_REDUCTIONS = {
    "u32": ("add", "min", "max", "inc", "dec", "and", "or", "xor"),
    "i32": ("add", "min", "max", "and", "or", "xor"),
    "u64": ("add", "min", "max", "and", "or", "xor"),
    "i64": ("min", "max"),
    "f16": ("add", "min", "max"),
    "bf16": ("add", "min", "max"),
    "f32": ("add",),
    "f32_ftz": ("add",),
    "f64": ("add",),
}


def _blank(tensor_map: TensorMap) -> Array:
    size = tensor_bytes(tensor_map.shape, tensor_map.strides, element_bytes(tensor_map.data_type))
    return np.full(-(-size // 16) * 16, 0xA5, "u1")


def _tiles(tensor_map: TensorMap, count: int) -> Array:
    size = smem_bytes(tensor_map)
    return (np.arange(count * size // 2, dtype="u2") + 1).view("u1").reshape(count, size)


def _stored(name: str, tensor_map: TensorMap, places: Places) -> Case:
    return store(name, tensor_map, _blank(tensor_map), places, _tiles(tensor_map, len(places)))


def _map(
    data_type: str, shape: tuple[int, ...], box: tuple[int, ...], **options: object
) -> TensorMap:
    strides = compact(shape, element_bytes(data_type))
    return TensorMap("tensor", data_type, shape, strides, box, **options)  # type: ignore[arg-type]


def _clipped() -> Iterator[Case]:
    """Disjoint boxes, clipped at the end of every dimension."""
    yield _stored("rank1", _map("u16", (100,), (32,)), [(8,), (40,), (88,)])
    yield _stored("rank2", _map("u16", (40, 9), (16, 4)), [(0, 0), (16, 3), (32, 7), (0, 8)])
    yield _stored("rank3", _map("u16", (24, 5, 6), (8, 3, 4)), [(0, 0, 0), (8, 2, 4), (16, 3, 5)])
    yield _stored("rank4", _map("u16", (16, 3, 4, 5), (8, 2, 2, 3)), [(0, 0, 1, 1), (8, 2, 3, 3)])
    places = [(0, 0, 0, 0, 0), (8, 2, 2, 2, 3)]
    yield _stored("rank5", _map("u16", (12, 3, 4, 3, 5), (8, 2, 2, 2, 3)), places)
    for data_type in ("u8", "u32", "u64", "f64"):
        size = element_bytes(data_type)
        tensor_map = _map(data_type, (96 // size, 6), (32 // size, 4))
        yield _stored(f"type_{data_type}", tensor_map, [(0, 0), (80 // size, 4)])
    tensor_map = TensorMap("tensor", "u8", (40, 6), (48,), (32, 4))
    yield _stored("padded", tensor_map, [(0, 0), (32, 4)])  # bytes between rows are unchanged


def _outside() -> Iterator[Case]:
    """Boxes that begin before the tensor (illegal instruction) or after its end (ignored)."""
    tensor_map = _map("u16", (40, 9), (16, 4))
    for place in ((-8, 0), (0, -1), (-16, 0), (0, -4), (40, 0), (1 << 20, 0), (0, 9), (0, 1 << 20)):
        yield _stored(f"outside_{place[0]}_{place[1]}", tensor_map, [place])
    yield _stored("outside_1d", _map("u16", (100,), (32,)), [(200,)])
    yield _stored("outside_3d", _map("f32", (40, 6, 5), (8, 3, 4)), [(0, -1, 0)])
    tensor_map = _map("u32", (32, 16), (32, 8))
    tensor, tiles = _operands("u32", 2, 512), _tiles(tensor_map, 1)
    yield store("outside_reduce", tensor_map, tensor, [(-8, 12)], tiles, "add")


def _swizzled() -> Iterator[Case]:
    for swizzle, span in (("32B", 32), ("64B", 64), ("128B", 128)):
        for part in (1, 2, 4):
            width = span // part
            if width < 16:
                continue
            tensor_map = _map("f16", (80, 40), (width // 2, 17), swizzle=swizzle)
            yield _stored(f"swizzle{swizzle}_{width}", tensor_map, [(0, 0), (72, 21), (8, 25)])
        tensor_map = _map("f32", (40, 6, 5), (span // 4, 3, 4), swizzle=swizzle)
        yield _stored(f"swizzle{swizzle}_3d", tensor_map, [(0, 0, 0), (4, 4, 3)])


def _stepped() -> Iterator[Case]:
    tensor_map = _map("u16", (32, 20), (16, 8), element_strides=(1, 2))
    yield _stored("steps", tensor_map, [(0, 0), (16, 13)])


def _operands(data_type: str, column: int, count: int) -> Array:
    name = {"i32": "u32", "i64": "u64", "f32_ftz": "f32"}.get(data_type, data_type)
    return bank(name, column, count).copy()


def _reduced() -> Iterator[Case]:
    """A whole tensor of adversarial values, reduced by boxes; one box is clipped."""
    for data_type, operations in _REDUCTIONS.items():
        size = element_bytes(data_type)
        width = 64 // size
        count = max(1024, 4096 // size)
        rows = count // width
        tensor_map = _map(data_type, (width, rows), (width, rows // 4))
        places = [(0, rows // 4 * i + (3 if i == 3 else 0)) for i in range(4)]
        tiles = _operands(data_type, 1, count).view("u1").reshape(4, -1)
        assert tiles.shape[1] == smem_bytes(tensor_map)
        for operation in operations:
            tensor = _operands(data_type, 0, count)
            yield store(
                f"reduce_{operation}_{data_type}", tensor_map, tensor, places, tiles, operation
            )
    tensor_map = _map("u32", (32, 16), (32, 8), swizzle="128B")
    tiles = scattered("overlap", 4 * smem_bytes(tensor_map)).reshape(4, -1)
    places = [(0, 0), (0, 0), (8, 4), (16, 12)]
    yield store("reduce_overlap", tensor_map, _operands("u32", 2, 512), places, tiles, "add")


def cases() -> Iterator[Case]:
    yield from _clipped()
    yield from _outside()
    yield from _swizzled()
    yield from _stepped()
    yield from _reduced()
