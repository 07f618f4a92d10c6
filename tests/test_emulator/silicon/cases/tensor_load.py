"""Tensor loads: every rank, type, swizzle and fill, and boxes that cross every bound."""

from collections.abc import Iterator
from itertools import product

import numpy as np

from tests.test_emulator.silicon.case import Case, TensorMap
from tests.test_emulator.silicon.cases.banks import bank
from tests.test_emulator.silicon.cases.tensor import (
    Places,
    compact,
    element_bytes,
    load,
    numbered,
    tensor_bytes,
)

_SPANS = {"32B": 32, "64B": 64, "128B": 128}
_PLAIN = ("u8", "u16", "u32", "i32", "u64", "i64", "f16", "f32", "f64", "bf16")


def _map(
    data_type: str, shape: tuple[int, ...], box: tuple[int, ...], **options: object
) -> TensorMap:
    strides = compact(shape, element_bytes(data_type))
    return TensorMap("tensor", data_type, shape, strides, box, **options)  # type: ignore[arg-type]


def _numbered(name: str, tensor_map: TensorMap, places: Places, offset: int = 0) -> Case:
    size = tensor_bytes(tensor_map.shape, tensor_map.strides, element_bytes(tensor_map.data_type))
    return load(name, tensor_map, numbered(-(-size // 16) * 16), places, offset)


def _everywhere(name: str, tensor_map: TensorMap) -> Iterator[Case]:
    """Boxes inside the tensor, across each bound, and outside: one case for each kind of place.

    The innermost coordinate is a multiple of 16 bytes; ``faults`` has other coordinates.
    """
    shape, box = tensor_map.shape, tensor_map.box
    aligned = 16 // element_bytes(tensor_map.data_type)  # elements in 16 bytes
    inside = tuple(min(aligned if not axis else 1, s - 1) for axis, s in enumerate(shape))

    def along(axis: int, *where: int) -> list[tuple[int, ...]]:
        return [(*inside[:axis], place, *inside[axis + 1 :]) for place in where]

    kinds = {
        "inside": [(0,) * len(shape), inside],
        "below_0": along(0, -aligned, -box[0]),
        "far_below": [tuple(-aligned * (1 << 20) for _ in shape)],
        "far_above": [tuple(1 << 20 for _ in shape)],
    }
    above = [s - b // 2 for s, b in zip(shape, box, strict=True)]
    above[0] = (shape[0] - 1) // aligned * aligned
    kinds["above"] = [tuple(above), *along(0, above[0], above[0] + aligned)]
    for axis, extent in enumerate(shape[1:], 1):
        kinds["above"] += along(axis, above[axis], extent - 1, extent)
        kinds[f"below_{axis}"] = along(axis, -1, 1 - box[axis], -box[axis])
    for kind, places in kinds.items():
        yield _numbered(f"{name}_{kind}", tensor_map, places)


def _ranks() -> Iterator[Case]:
    shapes = ((100,), (40, 9), (24, 5, 6), (16, 3, 4, 5), (16, 3, 4, 3, 5))
    boxes = ((32,), (16, 4), (8, 3, 4), (8, 2, 2, 3), (8, 2, 2, 2, 3))
    for rank, (shape, box) in enumerate(zip(shapes, boxes, strict=True), 1):
        yield from _everywhere(f"rank{rank}", _map("u16", shape, box))


def _types() -> Iterator[Case]:
    for data_type in _PLAIN:
        size = element_bytes(data_type)
        shape, box = (64 // size + 16 // size, 6), (32 // size, 4)
        yield from _everywhere(f"type_{data_type}", _map(data_type, shape, box))


def _swizzles() -> Iterator[Case]:
    """Boxes as wide as the swizzle span or narrower, with 1, 2, 4 and 8 byte elements.

    Rows of narrow boxes are a span apart; the mbarrier counts the bytes without the gaps.
    """
    for swizzle, span in _SPANS.items():
        for data_type, part in product(("u8", "f16", "f32", "u64"), (1, 2, 4, 8)):
            width = span // part
            if width < 16 or (data_type != "f16" and part > 1):
                continue
            size = element_bytes(data_type)
            box = (width // size, 17)
            shape = (160 // size, 24)
            places: Places = [(0, 0), (16 // size, 3), (-16 // size, -2), (112 // size, 20)]
            name = f"swizzle{swizzle}_{data_type}_{width}"
            yield _numbered(name, _map(data_type, shape, box, swizzle=swizzle), places)
        shape, box = (80, 6, 5), (span // 2, 3, 4)
        places = [(0, 0, 0), (8, -1, 2), (40, 4, 3)]
        yield _numbered(f"swizzle{swizzle}_3d", _map("bf16", shape, box, swizzle=swizzle), places)
        shape5, box5 = (80, 3, 3, 3, 3), (span // 2, 2, 3, 1, 2)
        places5 = [(0, 0, 0, 0, 0), (8, -1, 2, 1, 1), (40, 2, -1, 2, 2)]
        yield _numbered(f"swizzle{swizzle}_5d", _map("f16", shape5, box5, swizzle=swizzle), places5)
    # Widths that are multiples of 16 bytes, but no powers of two.
    for swizzle, width in (("64B", 48), ("128B", 48), ("128B", 80), ("128B", 112)):
        box = (width // 2, 9)
        tensor_map = _map("f16", (80, 12), box, swizzle=swizzle)
        yield _numbered(f"swizzle{swizzle}_f16_{width}", tensor_map, [(0, 0), (-8, 5)])


def _fills() -> Iterator[Case]:
    """Boxes whose out-of-bounds elements read as 0x7ff7 per 16 bits; TF32 rounds to nearest."""
    for data_type in ("f16", "bf16", "f32", "f64", "f32_ftz", "tf32", "tf32_ftz"):
        for nan in (False, True):
            size = element_bytes(data_type)
            shape, box = (64 // size, 16), (64 // size, 8)
            source = {"f16": "f16", "bf16": "bf16", "f64": "f64"}.get(data_type, "f32")
            tensor = bank(source, 0, 1024)[:: 1024 // (shape[0] * 16)][: shape[0] * 16]
            tensor_map = _map(data_type, shape, box, nan_fill=nan)
            places = [(0, 0), (0, 8), (-(16 // size), -3), (48 // size, 12), (0, 100)]
            yield load(f"fill_{data_type}{'_nan' if nan else ''}", tensor_map, tensor, places)


def _rounded() -> Case:
    """Boxes of tf32 maps over values at their rounding edges."""
    tensor = np.ascontiguousarray(bank("narrow", 0, 1024))
    return load(
        "tf32_edges", _map("tf32", (32, 32), (32, 8)), tensor, [(0, 8 * i) for i in range(4)]
    )


def _offsets() -> Iterator[Case]:
    """Swizzled boxes that start within a repeat of the swizzle pattern."""
    for swizzle, offset in (("32B", 128), ("64B", 128), ("64B", 256), ("128B", 128), ("128B", 640)):
        tensor_map = _map("f16", (80, 24), (_SPANS[swizzle] // 2, 12), swizzle=swizzle)
        yield _numbered(f"offset_{swizzle}_{offset}", tensor_map, [(0, 0), (8, 3)], offset)


def _steps() -> Iterator[Case]:
    """Boxes of every n-th element, by element strides; the innermost stride is ignored."""
    for steps in ((1, 2), (1, 3), (1, 5), (2, 2), (1, 8)):
        tensor_map = _map("u16", (32, 20), (16, 8), element_strides=steps)
        name = f"steps_{steps[0]}_{steps[1]}"
        yield _numbered(name, tensor_map, [(0, 0), (8, 1), (16, 3)])
        yield _numbered(f"{name}_outside", tensor_map, [(-8, -3), (24, 15), (0, -1)])
    tensor_map = _map("u16", (16, 9, 9), (8, 6, 6), element_strides=(1, 2, 3))
    yield _numbered("steps_3d", tensor_map, [(0, 0, 0), (0, 1, 2), (8, -1, -2), (8, 6, 7)])
    tensor_map = _map("f16", (64, 20), (32, 8), element_strides=(1, 2), swizzle="64B")
    yield _numbered("steps_swizzled", tensor_map, [(0, 0), (8, -3), (48, 15)])


def _layouts() -> Iterator[Case]:
    """Maps with strides that skip, repeat or overlap rows, an offset base, and L2 promotion."""
    for name, strides in (("padded", (64, 480)), ("overlapping", (16, 32))):
        tensor_map = TensorMap("tensor", "u16", (16, 5, 4), strides, (16, 3, 2))
        yield load(
            f"layout_{name}",
            tensor_map,
            numbered(2560),
            [(0, 0, 0), (8, 3, 3), (-8, -1, 1), (0, 2, 2)],
        )
    tensor_map = TensorMap("tensor", "u8", (48, 6), (64,), (32, 4), l2_promotion=2, offset=32)
    yield load("layout_offset", tensor_map, numbered(1024), [(0, 0), (16, 3), (-16, -1)])


def cases() -> Iterator[Case]:
    yield from _ranks()
    yield from _types()
    yield from _swizzles()
    yield from _fills()
    yield _rounded()
    yield from _offsets()
    yield from _steps()
    yield from _layouts()
