"""Replay of a recorded case in the emulator."""

import struct

import numpy as np

from tests.emulator import Gpu, Schedule
from tests.emulator.findings import ParityAliasing
from tests.emulator.tma.element_type import ElementType
from tests.emulator.tma.swizzle import Swizzle
from tests.emulator.tma.tensor_map import Interleave, encode
from tests.emulator.tma.tensor_map import TensorMap as Descriptor
from tests.test_emulator.silicon.case import (
    DATA_TYPES,
    INTERLEAVES,
    SWIZZLES,
    Array,
    Case,
    TensorMap,
)

CAPABILITY = 90


def descriptor(tensor_map: TensorMap, address: int) -> bytes:
    """Tensor map of 128 bytes, encoded by the emulator for an array at ``address``.

    Raises:
        IllegalInstruction: the driver would refuse the map.
    """
    driver = DATA_TYPES[tensor_map.data_type][0]
    return encode(
        Descriptor(
            element_type=next(kind for kind in ElementType if kind.driver == driver),
            address=address + tensor_map.offset,
            dims=tensor_map.shape,
            strides=tensor_map.strides,
            box=tensor_map.box,
            element_strides=tensor_map.element_strides or (1,) * len(tensor_map.box),
            interleave=Interleave(INTERLEAVES.index(tensor_map.interleave)),
            swizzle=Swizzle(SWIZZLES.index(tensor_map.swizzle)),
            l2_promotion=tensor_map.l2_promotion,
            nan_fill=tensor_map.nan_fill,
        ),
        CAPABILITY,
    )


def _device_array(array: Array) -> Array:
    """Copy of an array, aligned to 256 bytes as device allocations are."""
    storage = np.zeros(array.nbytes + 256, "u1")
    skip = -storage.ctypes.data % 256
    copy = storage[skip : skip + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def run_on_emulator(
    case: Case, schedule: Schedule | None = None, rounds_like_h200: bool = False
) -> dict[str, Array]:
    """Outputs of a case after its launch.

    Raises:
        EmulatorError: any finding of the emulator.
    """
    # Cases test both parities of a phase, to record the result of a wait for the wrong parity.
    gpu = Gpu(tolerated=(ParityAliasing,), rounds_like_h200=rounds_like_h200)
    arrays = {n: _device_array(a) for n, a in (*case.inputs.items(), *case.outputs.items())}
    for name, array in arrays.items():
        gpu.memory.register_array(
            array.reshape(-1).view("u1"), name=name, writable=name in case.outputs
        )
    parameters = [struct.pack("<Q", array.ctypes.data) for array in arrays.values()]
    for tensor_map in case.maps.values():
        parameters.append(descriptor(tensor_map, arrays[tensor_map.array].ctypes.data))
    gpu.launch(
        gpu.load(case.ptx),
        case.entry,
        grid=case.grid,
        block=case.block,
        cluster=case.cluster,
        dynamic_shared=case.dynamic_shared,
        parameters=parameters,
        schedule=schedule,
    )
    return {name: arrays[name] for name in case.outputs}
