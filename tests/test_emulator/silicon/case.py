"""Recorded experiment: a PTX module, its launch, and input and output arrays."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# CUtensorMapDataType by name (CUDA driver API), and bytes per element.
DATA_TYPES = {
    "u8": (0, 1),
    "u16": (1, 2),
    "u32": (2, 4),
    "i32": (3, 4),
    "u64": (4, 8),
    "i64": (5, 8),
    "f16": (6, 2),
    "f32": (7, 4),
    "f64": (8, 8),
    "bf16": (9, 2),
    "f32_ftz": (10, 4),
    "tf32": (11, 4),
    "tf32_ftz": (12, 4),
    "u4x16_align8": (13, 0),
    "u4x16_align16": (14, 0),
    "u6x16_align16": (15, 0),
}
INTERLEAVES = ("none", "16B", "32B")
SWIZZLES = ("none", "32B", "64B", "128B", "128B_atom_32B", "128B_atom_32B_flip_8B", "128B_atom_64B")


@dataclass(frozen=True)
class TensorMap:
    """Arguments of ``cuTensorMapEncodeTiled`` for one array of a case.

    Attributes:
        array: name of the input or output that the map describes.
        data_type: a key of ``DATA_TYPES``.
        shape: elements along each dimension, fastest first.
        strides: bytes between elements of dimensions 1 and up.
        box: elements of a tile along each dimension.
        element_strides: step between the elements of a tile; None for all ones.
        interleave, swizzle: a member of ``INTERLEAVES`` and of ``SWIZZLES``.
        l2_promotion: 0 (none) to 3 (256 bytes).
        nan_fill: whether out-of-bounds elements read NaN instead of zero.
        offset: bytes from the start of the array to the tensor's first element.
    """

    array: str
    data_type: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] | None = None
    interleave: str = "none"
    swizzle: str = "none"
    l2_promotion: int = 0
    nan_fill: bool = False
    offset: int = 0


@dataclass(frozen=True)
class Case:
    """A launch whose outputs were recorded.

    Parameters of the kernel, in order: a pointer for each input, for each output, then the maps.

    Attributes:
        name: name, unique in its family.
        ptx: whole module text.
        entry: kernel name.
        grid, block, cluster: launch dimensions.
        dynamic_shared: bytes of dynamic shared memory.
        inputs: arrays by name.
        outputs: initial contents by name; the recording holds the contents after the launch.
        maps: tensor maps by parameter name.
        rows: by output, the instruction that wrote each row, for messages.
        tolerance: by output and row, the allowed error of a result; absent for bit equality.
        ops: the lane-wise instructions (``cases.instructions.Op``) that made the rows, in order.
    """

    name: str
    ptx: str
    inputs: dict[str, Array]
    outputs: dict[str, Array]
    entry: str = "kernel"
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_shared: int = 0
    maps: dict[str, TensorMap] = field(default_factory=dict)
    rows: dict[str, list[str]] = field(default_factory=dict)
    tolerance: dict[str, dict[int, "Tolerance"]] = field(default_factory=dict)
    ops: tuple[Any, ...] = ()

    def digest(self) -> str:
        """Hash of everything that decides the outputs, so that a stale recording is noticed."""
        state = hashlib.blake2b(digest_size=8)
        launch = (self.entry, self.grid, self.block, self.cluster, self.dynamic_shared, self.maps)
        state.update(f"{self.ptx}{launch}".encode())
        for name, array in (*self.inputs.items(), *self.outputs.items()):
            state.update(f"{name}{array.dtype}{array.shape}".encode())
            state.update(np.ascontiguousarray(array).tobytes())
        return state.hexdigest()


@dataclass(frozen=True)
class Tolerance:
    """Allowed difference between an approximate result and the recorded result.

    Attributes:
        format: ``f16``, ``bf16``, ``f32`` or ``f64``, the type of one result.
        ulps: units in the last place.
        absolute: a difference that is always accepted.
        any_nan: whether all NaN are equal. Hopper returns 0x7fffffff from f32 and the first
            operand's payload from some f64 arithmetic; PTX promises neither.
    """

    format: str
    ulps: int = 0
    absolute: float = 0.0
    any_nan: bool = True


def random_bits(seed: str, count: int) -> npt.NDArray[np.uint64]:
    """Array of ``count`` 64-bit words that depend on the seed alone (splitmix64)."""
    start = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "little")
    with np.errstate(over="ignore"):
        state = np.uint64(start) + np.uint64(0x9E3779B97F4A7C15) * np.arange(
            1, count + 1, dtype=np.uint64
        )
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def random_array(seed: str, shape: tuple[int, ...], dtype: str) -> Array:
    """Random bits of the given integer dtype and shape."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape))
    words = random_bits(seed, -(-count * kind.itemsize // 8))
    return words.view(kind)[:count].reshape(shape).copy()
