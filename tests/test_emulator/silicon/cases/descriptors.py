"""Tensor maps that are only encoded: arguments that the driver accepts, and the encoded words."""

from collections.abc import Iterator

from tests.test_emulator.silicon.case import DATA_TYPES, INTERLEAVES, SWIZZLES, TensorMap

ADDRESS = 0x7F4012345600


def _two(data_type: str, **options: object) -> TensorMap:
    arguments: dict[str, object] = {
        "shape": (1024, 100),
        "strides": (8192,),
        "box": (16, 8),
    } | options
    return TensorMap("", data_type, **arguments)  # type: ignore[arg-type]


def maps() -> Iterator[tuple[str, TensorMap]]:
    """Yield a name and a tensor map for each set of arguments, with a tensor at ``ADDRESS``."""
    for data_type in DATA_TYPES:
        for nan in (False, True):
            yield f"{data_type} nan={nan}", _two(data_type, nan_fill=nan)
        box = (128, 8)
        yield f"{data_type} box 128", _two(data_type, box=box)
        yield f"{data_type} box 128, 128B", _two(data_type, box=box, swizzle="128B")
    for swizzle in SWIZZLES:
        for width in (8, 16, 24, 32, 48, 64, 96, 128):
            yield f"{swizzle} f16 box {width}", _two("f16", box=(width, 8), swizzle=swizzle)
        for interleave in INTERLEAVES:
            tensor_map = TensorMap("", "f16", (64, 20, 10, 4), (512, 10240, 102400), (8, 4, 4, 2),
                                   interleave=interleave, swizzle=swizzle)  # fmt: skip
            yield f"{interleave} interleave, {swizzle}", tensor_map
    for promotion in range(4):
        yield f"promotion {promotion}", _two("u8", l2_promotion=promotion)
    for rank in range(1, 6):
        shape = (1000, 1 << 20, 77, 5, 9)[:rank]
        strides = (1 << 12, (1 << 36) + 16, 1 << 37, (1 << 40) - 16)[: rank - 1]
        boxes = (32, 256, 1, 2, 4)[:rank]
        steps = (1, 2, 3, 8, 7)[:rank]
        yield f"rank {rank}", TensorMap("", "u32", shape, strides, boxes)
        yield (
            f"rank {rank}, steps",
            TensorMap("", "u32", shape, strides, boxes, element_strides=steps),
        )
    for field, value in (
        ("box", (0, 8)), ("box", (257, 8)), ("box", (256, 256)), ("box", (12, 8)),
        ("box", (16, 257)),
        ("shape", (0, 100)), ("shape", (1 << 32, 100)), ("shape", ((1 << 32) + 1, 100)),
        ("strides", (8,)), ("strides", (8200,)), ("strides", (1 << 40,)), ("strides", (0,)),
        ("strides", (64,)), ("element_strides", (0, 1)), ("element_strides", (1, 9)),
        ("element_strides", (8, 8)), ("offset", 8), ("offset", 16),
    ):  # fmt: skip
        yield f"{field} {value}", _two("f16", **{field: value})
