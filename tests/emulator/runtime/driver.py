"""Entry points that CuTe's host code calls: library loading, queries, launches."""

import ctypes
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.emulator.findings import CooperativeLaunchTooLarge, LaunchError
from tests.emulator.ptx.shared_arrays import guard_bytes
from tests.emulator.runtime.attributes import (
    ATTRIBUTE_BYTES,
    UnmodelledCall,
    decode_launch_attributes,
    device_attribute,
)
from tests.emulator.runtime.device import Device, Dimensions
from tests.emulator.runtime.fatbin import ptx_of, read_image
from tests.emulator.runtime.tensor_maps import encode_tiled

# cudaError_t.
_SUCCESS, _INVALID_VALUE, _LAUNCH_FAILURE, _NOT_SUPPORTED = 0, 1, 719, 801
COOPERATIVE_LAUNCH_TOO_LARGE = 720

_SHARED_SIZE_BYTES = 1  # CUfunction_attribute
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14  # cudaFuncAttribute
_PORTABLE_CLUSTER = 8
_CONFIG = struct.Struct("<6IQQQI")


@dataclass
class LoadedKernel:
    """A kernel handle that host code holds.

    Attributes:
        ptx: PTX of the module; the device caches the compiled program.
        name: entry name.
        max_dynamic_shared: bytes that the host has opted in to.
        non_portable_cluster: whether the host allows clusters of more than 8 CTAs.
    """

    ptx: str
    name: str
    max_dynamic_shared: int = 48 * 1024
    non_portable_cluster: bool = False


class Driver:
    """Entry points of CuTe's runtime library for one device.

    An exception in an entry point cannot cross the host code's native frames: the host code sees an
    error code, and the exception waits in :meth:`take_pending` of the same thread.

    Args:
        device: device that runs the kernels; may be replaced at any time.
        capability: (10, 0) for sm_100a, (10, 3) for sm_103a, (9, 0) for sm_90a.
        set_detail: called with the text that belongs to an error code.
    """

    def __init__(
        self, device: Device, capability: tuple[int, int], set_detail: Callable[[str], None]
    ) -> None:
        self.device = device
        self.capability = capability
        self._set_detail = set_detail
        self._local = threading.local()
        self._handles: dict[int, LoadedKernel | str] = {}
        self._next_handle = 1
        self._calls: dict[str, Callable[..., None]] = {
            "_cudaLibraryLoadData": self._load,
            "_cuLibraryLoadData": self._load,
            "_cudaLibraryUnload": self._unload,
            "_cuLibraryUnload": self._unload,
            "_cudaLibraryGetKernel": self._get_kernel,
            "_cuLibraryGetKernel": self._get_kernel,
            "_cudaLibraryGetKernelCount": self._count_kernels,
            "_cuKernelGetAttribute": self._get_kernel_attribute,
            "_cudaFuncSetAttribute": self._set_kernel_attribute,
            "_cudaKernelSetAttributeForDevice": self._set_kernel_attribute,
            "_cudaOccupancyMaxActiveBlocksPerMultiprocessor": self._occupancy,
            "_cudaLaunchKernelEx": self._launch_extended,
            "_cudaLaunchKernel": self._launch_plain,
            "_cuTensorMapEncodeTiled": self._encode_tensor_map,
            "_cudaDeviceGetAttribute": self._get_device_attribute,
            "_cudaGetDevice": lambda result: _store_int(result, 0),
            "_cuDeviceGet": self._get_device,
            "_cudaSetDevice": _check_device,
            "_cudaGetDeviceCount": lambda result: _store_int(result, 1),
            "_cudaStreamCreate": lambda result: _store_pointer(result, 0),
            "_cudaStreamDestroy": lambda stream: None,
            "_cudaStreamSynchronize": lambda stream: self.device.synchronise(stream),
            "_cudaDeviceSynchronize": lambda: self.device.synchronise(),
        }

    def dispatch(self, name: bytes, words: Any, count: int) -> int:
        """Run one entry point; returns a ``cudaError_t``."""
        try:
            call = self._calls.get(name.decode())
            if call is None:
                raise UnmodelledCall(f"{name.decode()}: the emulator's runtime does not model it")
            call(*words[:count])
        except BaseException as error:  # every exception has to reach the caller of the host code
            self._local.pending = error
            self._set_detail(f"{type(error).__name__}: {error}")
            if isinstance(error, UnmodelledCall):
                return _NOT_SUPPORTED
            if isinstance(error, CooperativeLaunchTooLarge):
                return COOPERATIVE_LAUNCH_TOO_LARGE
            return _INVALID_VALUE if isinstance(error, LaunchError) else _LAUNCH_FAILURE
        return _SUCCESS

    @property
    def pending(self) -> BaseException | None:
        """Latest exception raised under this thread's host code and not yet taken."""
        return getattr(self._local, "pending", None)

    def take_pending(self) -> BaseException | None:
        pending = self.pending
        self._local.pending = self._local.refused_map = None
        return pending

    def _handle(self, value: LoadedKernel | str) -> int:
        handle = self._next_handle
        self._next_handle += 1
        self._handles[handle] = value
        return handle

    def _kernel(self, handle: int) -> LoadedKernel:
        kernel = self._handles.get(handle)
        if not isinstance(kernel, LoadedKernel):
            raise LaunchError(f"kernel handle {handle:#x}: not a loaded kernel")
        return kernel

    def _static_shared(self, kernel: LoadedKernel) -> int:
        module = self.device.load(kernel.ptx)
        variables = (*module.kernels[kernel.name].variables, *module.variables.values())
        return sum(v.nbytes for v in variables if v.space == "shared")

    def _guards(self, kernel: LoadedKernel) -> int:
        """Number of guard bytes in dynamic shared memory; a real device would not need them."""
        return guard_bytes(self.device.load(kernel.ptx).kernels[kernel.name].shared_arrays)

    def _library(self, handle: int) -> str:
        ptx = self._handles.get(handle)
        if not isinstance(ptx, str):
            raise LaunchError(f"library handle {handle:#x}: not a loaded library")
        return ptx

    def _load(self, result: int, image: int, *options: int) -> None:
        if any(options):
            raise UnmodelledCall(f"loading a library with options {options}")
        ptx = ptx_of(read_image(image))
        self.device.load(ptx)
        _store_pointer(result, self._handle(ptx))

    def _unload(self, library: int) -> None:
        self._library(library)
        del self._handles[library]

    def _get_kernel(self, result: int, library: int, name: int) -> None:
        ptx, entry = self._library(library), ctypes.string_at(name).decode()
        module = self.device.load(ptx)
        if entry not in module.kernels:
            raise LaunchError(f"kernel: {entry!r}, the library has {sorted(module.kernels)}")
        _store_pointer(result, self._handle(LoadedKernel(ptx, entry)))

    def _count_kernels(self, result: int, library: int) -> None:
        _store_int(result, len(self.device.load(self._library(library)).kernels))

    def _get_kernel_attribute(self, result: int, attribute: int, kernel: int, device: int) -> None:
        _check_device(device)
        if attribute != _SHARED_SIZE_BYTES:
            raise UnmodelledCall(f"kernel attribute {attribute}, modelled is {_SHARED_SIZE_BYTES}")
        _store_int(result, self._static_shared(self._kernel(kernel)))

    def _set_kernel_attribute(
        self, kernel: int, attribute: int, value: int, device: int = 0
    ) -> None:
        _check_device(device)
        loaded = self._kernel(kernel)
        if attribute == _MAX_DYNAMIC_SHARED:
            limit = self.device.limits.shared - self._static_shared(loaded) + self._guards(loaded)
            if value > limit:
                raise LaunchError(
                    f"dynamic shared memory: {value} bytes for {loaded.name}, the device "
                    f"has {limit}"
                )
            loaded.max_dynamic_shared = value
        elif attribute == _NON_PORTABLE_CLUSTER:
            loaded.non_portable_cluster = bool(value)
        else:
            raise UnmodelledCall(
                f"setting kernel attribute {attribute}, modelled are "
                f"{_MAX_DYNAMIC_SHARED} and {_NON_PORTABLE_CLUSTER}"
            )

    def _occupancy(self, result: int, kernel: int, threads: int, dynamic_shared: int) -> None:
        limits = self.device.limits
        loaded = self._kernel(kernel)
        taken = self._static_shared(loaded) + dynamic_shared - self._guards(loaded)
        shared = taken + limits.reserved
        # Registers are unknown: PTX does not say how many ptxas would give the kernel.
        by_threads, by_shared = limits.threads_per_sm // threads, limits.shared_per_sm // shared
        _store_int(result, min(limits.ctas_per_sm, by_threads, by_shared))

    def _launch_extended(self, config: int, kernel: int, arguments: int) -> None:
        *extents, dynamic_shared, stream, attributes, count = _CONFIG.unpack(
            ctypes.string_at(config, _CONFIG.size)
        )
        records = ctypes.string_at(attributes, count * ATTRIBUTE_BYTES) if count else b""
        cluster, named = decode_launch_attributes(records)
        self._launch(kernel, extents, cluster, dynamic_shared, arguments, named, stream)

    def _launch_plain(self, kernel: int, *words: int) -> None:
        *extents, arguments, dynamic_shared, stream = words
        self._launch(kernel, extents, (1, 1, 1), dynamic_shared, arguments, {}, stream)

    def _launch(
        self,
        kernel: int,
        extents: list[int],
        cluster: Dimensions,
        dynamic_shared: int,
        arguments: int,
        attributes: dict[str, int],
        stream: int,
    ) -> None:
        refused = getattr(self._local, "refused_map", None)
        if refused is not None:  # CUDA's host code has aborted by now
            self._local.refused_map = None
            raise refused
        loaded = self._kernel(kernel)
        needed = dynamic_shared - self._guards(loaded)
        if needed > loaded.max_dynamic_shared:
            raise LaunchError(
                f"dynamic shared memory: {needed} bytes, {loaded.name} is allowed "
                f"{loaded.max_dynamic_shared}; set its maximum first"
            )
        ctas = cluster[0] * cluster[1] * cluster[2]
        if ctas > _PORTABLE_CLUSTER and not loaded.non_portable_cluster:
            raise LaunchError(
                f"cluster: {ctas} CTAs, {loaded.name} does not allow more than {_PORTABLE_CLUSTER}"
            )
        module = self.device.load(loaded.ptx)
        sizes = [parameter.nbytes for parameter in module.kernels[loaded.name].parameters]
        pointers = (ctypes.c_void_p * len(sizes)).from_address(arguments) if sizes else ()
        self.device.launch(
            module,
            loaded.name,
            (extents[0], extents[1], extents[2]),
            (extents[3], extents[4], extents[5]),
            cluster,
            dynamic_shared,
            [ctypes.string_at(p or 0, n) for p, n in zip(pointers, sizes, strict=True)],
            attributes,
            stream=stream,
        )

    def _encode_tensor_map(self, result: int, *words: int) -> None:
        capability = 10 * self.capability[0] + self.capability[1]
        try:
            descriptor = encode_tiled(*words, capability=capability)
        except BaseException as error:
            self._local.refused_map = error
            raise
        ctypes.memmove(result, descriptor, len(descriptor))

    def _get_device_attribute(self, result: int, attribute: int, device: int) -> None:
        _check_device(device)
        _store_int(result, device_attribute(self.device.limits, self.capability, attribute))

    def _get_device(self, result: int, ordinal: int) -> None:
        _check_device(ordinal)
        _store_int(result, 0)


def _check_device(device: int) -> None:
    if device:
        raise LaunchError(f"device {device}: the emulator is one device, 0")


def _store_int(address: int, value: int) -> None:
    ctypes.c_int32.from_address(address).value = value


def _store_pointer(address: int, value: int) -> None:
    ctypes.c_void_p.from_address(address).value = value
