"""Kernels that copy one box in each CTA, and tensors to copy, shared by the tensor-copy cases."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from tests.test_emulator.silicon.case import DATA_TYPES, Array, Case, TensorMap, random_array
from tests.test_emulator.silicon.ptx_text import (
    PROLOGUE,
    dump,
    fill,
    module,
    shared_array,
    upload,
    wait,
)

# Coordinates of boxes, innermost first.
Places = Sequence[tuple[int, ...]]

THREADS = 32
_CONFIG = 8  # words of a CTA's configuration: five coordinates, bytes, offset in smem, one spare

# Loads the CTA's coordinates to %c0.., its number of bytes, and its box's address in smem.
_CONFIGURE = f"""\
.reg .b32 %c<5>, %bytes, %box;
mad.wide.u32 %d0, %cta_x, {4 * _CONFIG}, %config;
ld.global.v4.b32 {{%c0, %c1, %c2, %c3}}, [%d0];
ld.global.v4.b32 {{%c4, %bytes, %box, %r0}}, [%d0+16]; add.u32 %box, %box, %base;"""


def coordinates(rank: int) -> str:
    return "{" + ", ".join(f"%c{i}" for i in range(rank)) + "}"


def element_bytes(data_type: str) -> int:
    return DATA_TYPES[data_type][1]


def configuration(places: Places, moved: int, offset: int = 0) -> Array:
    """Rows of: five padded coordinates, an mbarrier's expected bytes, an offset in ``smem``."""
    table = np.zeros((len(places), _CONFIG), "i4")
    for row, place in zip(table, places, strict=True):
        row[: len(place)] = place
        row[5:7] = moved, offset
    return table


def compact(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Strides in bytes of dimensions 1 and up, each the smallest valid multiple of 16."""
    strides = []
    pitch = size
    for extent in shape[:-1]:
        pitch = -(-pitch * extent // 16) * 16
        strides.append(pitch)
    return tuple(strides)


def tensor_bytes(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> int:
    return strides[-1] * shape[-1] if strides else shape[0] * size


def smem_bytes(tensor_map: TensorMap) -> int:
    """Bytes of shared memory for a box, in whole KB; a row takes at least the swizzle span."""
    steps = tensor_map.element_strides or (1,) * len(tensor_map.box)
    taken = [-(-extent // step) for extent, step in zip(tensor_map.box, steps, strict=True)]
    taken[0] = tensor_map.box[0]  # dimension 0 has no step without interleaving
    span = int(tensor_map.swizzle.rstrip("B").split("B")[0]) if tensor_map.swizzle != "none" else 16
    row = max(taken[0] * element_bytes(tensor_map.data_type), span)
    return -(-row * int(np.prod(taken[1:], dtype=int)) // 1024) * 1024


def moved_bytes(tensor_map: TensorMap) -> int:
    """Bytes that a load adds to its mbarrier: the whole box, in bounds or not."""
    steps = tensor_map.element_strides or (1,) * len(tensor_map.box)
    taken = [-(-extent // step) for extent, step in zip(tensor_map.box, steps, strict=True)]
    taken[0] = tensor_map.box[0]
    return int(np.prod(taken)) * element_bytes(tensor_map.data_type)


@cache
def load_ptx(rank: int, size: int) -> str:
    """Kernel in which each CTA fills ``smem``, loads its box, and dumps all of ``smem``."""
    body = [
        PROLOGUE,
        _CONFIGURE,
        fill(size, THREADS),
        "@%main mbarrier.init.shared::cta.b64 [%bar], 1;",
        "fence.proxy.async; bar.sync 0; @!%main bra LOADED;",
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], %bytes;",
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        f" [%box], [%map, {coordinates(rank)}], [%bar];",
        "LOADED:",
        wait("%bar", 0, "WAIT"),
        f"mad.wide.u32 %d1, %cta_x, {size}, %out;",
        dump(size, THREADS, "%d1"),
    ]
    return module(["tensor", "config", "out"], body, maps=["map"], declarations=shared_array(size))


def load(
    name: str,
    tensor_map: TensorMap,
    tensor: Array,
    places: Places,
    offset: int = 0,
) -> Case:
    """Case that loads one box for each place.

    Args:
        name: name of the case.
        tensor_map: map of ``tensor``.
        tensor: source.
        places: coordinates of each CTA's box.
        offset: the box's offset in shared memory, in bytes.
    """
    size = -(-(smem_bytes(tensor_map) + offset) // 1024) * 1024
    return Case(
        name,
        load_ptx(len(tensor_map.box), size),
        {"tensor": tensor, "config": configuration(places, moved_bytes(tensor_map), offset)},
        {"out": np.zeros((len(places), size), "u1")},
        grid=(len(places), 1, 1),
        block=(THREADS, 1, 1),
        maps={"map": tensor_map},
        rows={"out": [str(place) for place in places]},
    )


@cache
def store_ptx(rank: int, size: int, operation: str = "") -> str:
    """Kernel in which each CTA stores or reduces its tile into the tensor.

    CTAs are unordered: their boxes must not overlap, or the operation must commute.
    """
    opcode = "cp.reduce.async" if operation else "cp.async"
    infix = f".{operation}" if operation else ""
    body = [
        PROLOGUE,
        _CONFIGURE,
        f"mad.wide.u32 %d1, %cta_x, {size}, %tiles;",
        upload(size, THREADS, "%d1"),
        "fence.proxy.async; bar.sync 0; @!%main bra STORED;",
        f"{opcode}.bulk.tensor.{rank}d.global.shared::cta{infix}.tile.bulk_group"
        f" [%map, {coordinates(rank)}], [%box];",
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
        "STORED:",
    ]
    return module(
        ["config", "tiles", "tensor"], body, maps=["map"], declarations=shared_array(size)
    )


def store(
    name: str,
    tensor_map: TensorMap,
    tensor: Array,
    places: Places,
    tiles: Array,
    operation: str = "",
) -> Case:
    """Case that stores a box of ``tiles``, or reduces by ``operation``, at each of ``places``."""
    size = smem_bytes(tensor_map)
    assert tiles.shape == (len(places), size)
    return Case(
        name,
        store_ptx(len(tensor_map.box), size, operation),
        {"config": configuration(places, 0), "tiles": tiles},
        {"tensor": tensor},
        grid=(len(places), 1, 1),
        block=(THREADS, 1, 1),
        maps={"map": tensor_map},
    )


def numbered(size: int) -> Array:
    """Array of ``size`` bytes: 16-bit numbers in order, so that each value gives its position."""
    return np.arange(size // 2, dtype="u2").view("u1")


def scattered(name: str, size: int) -> Array:
    return random_array(name, (size,), "u1")
