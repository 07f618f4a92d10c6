"""Launch and device attributes, by their names in CUDA's documentation."""

import struct
from typing import TYPE_CHECKING

from tests.emulator.findings import EmulatorError, LaunchError
from tests.emulator.runtime.device import Dimensions

if TYPE_CHECKING:
    from tests.emulator.machine.limits import Limits


class UnmodelledCall(EmulatorError):
    """A CUDA request by host code that the emulator's runtime does not support."""


# cudaLaunchAttributeID (CUDA Runtime API, "Data types used by CUDA Runtime"): attributes with a
# 32-bit number as value. ID 0 means that the entry is ignored.
_NUMBERS = {
    2: "cooperative",
    3: "synchronization_policy",
    5: "cluster_scheduling_policy_preference",
    6: "programmatic_stream_serialization",
    8: "priority",
    10: "mem_sync_domain",
    14: "preferred_shared_memory_carveout",
}
_SHAPES = _IGNORE, _CLUSTER, _PREFERRED_CLUSTER = 0, 4, 11
# An event and its flags. Launches run one after the other: the event is complete on return.
_EVENTS = {7: "programmatic_event", 12: "launch_completion_event"}
_UNMODELLED = {
    1: "access_policy_window",
    9: "mem_sync_domain_map",
    13: "device_updatable_kernel_node",
    16: "nvlink_util_centric_scheduling",
    17: "portable_cluster_size_mode",
    18: "shared_memory_mode",
}
ATTRIBUTE_BYTES = 72
_VALUE = 8


def decode_launch_attributes(data: bytes) -> tuple[Dimensions, dict[str, int]]:
    """Cluster extents, and the other launch attributes by name.

    Args:
        data: the launch's ``cudaLaunchAttribute`` records, 72 bytes each.

    Raises:
        UnmodelledCall: the emulator cannot honour an attribute; the message names it.
        LaunchError: an attribute that CUDA does not document.
    """
    cluster = (1, 1, 1)
    attributes = {}
    for at in range(0, len(data), ATTRIBUTE_BYTES):
        (identity,) = struct.unpack_from("<I", data, at)
        if identity == _CLUSTER:
            cluster = struct.unpack_from("<III", data, at + _VALUE)
        elif identity == _PREFERRED_CLUSTER:
            # An optional hint, which this device ignores.
            for axis, extent in zip(
                "xyz", struct.unpack_from("<III", data, at + _VALUE), strict=True
            ):
                attributes[f"preferred_cluster_{axis}"] = extent
        elif identity in _NUMBERS:
            (attributes[_NUMBERS[identity]],) = struct.unpack_from("<i", data, at + _VALUE)
        elif identity in _EVENTS:
            (attributes[_EVENTS[identity]],) = struct.unpack_from("<i", data, at + _VALUE + 8)
        elif identity in _UNMODELLED:
            raise UnmodelledCall(f"launch attribute {_UNMODELLED[identity]} ({identity})")
        elif identity != _IGNORE:
            raise LaunchError(
                f"launch attribute {identity}: unknown, accepted are "
                f"{sorted({*_NUMBERS, *_EVENTS, *_UNMODELLED, *_SHAPES})}"
            )
    return cluster, attributes


def device_attribute(limits: "Limits", capability: tuple[int, int], attribute: int) -> int:
    """Value of a ``cudaDeviceAttr`` of the emulated chip.

    Raises:
        UnmodelledCall: the attribute has no modelled value.
    """
    values = {
        1: limits.threads,  # maxThreadsPerBlock
        2: 1024,  # maxBlockDimX, Y, Z
        3: 1024,
        4: 64,
        5: 2**31 - 1,  # maxGridDimX, Y, Z
        6: 65535,
        7: 65535,
        8: 48 * 1024,  # maxSharedMemoryPerBlock without opting in
        10: 32,  # warpSize
        12: limits.registers,  # maxRegistersPerBlock
        16: limits.sms,  # multiProcessorCount
        39: limits.threads_per_sm,  # maxThreadsPerMultiProcessor
        75: capability[0],  # computeCapabilityMajor
        76: capability[1],  # computeCapabilityMinor
        81: limits.shared_per_sm,  # maxSharedMemoryPerMultiprocessor
        82: limits.registers,  # maxRegistersPerMultiprocessor
        95: 1,  # cooperativeLaunch
        97: limits.shared,  # maxSharedMemoryPerBlockOptin
        106: 32,  # maxBlocksPerMultiprocessor
        111: limits.shared_per_sm - limits.shared,  # reservedSharedMemoryPerBlock
        120: 1,  # clusterLaunch
    }
    if attribute not in values:
        raise UnmodelledCall(f"device attribute {attribute}, modelled are {sorted(values)}")
    return values[attribute]
