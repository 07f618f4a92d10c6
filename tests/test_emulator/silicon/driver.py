"""CUDA driver through ctypes, to run a case on a GPU; needs only ``libcuda.so.1`` and numpy."""

import ctypes
from collections.abc import Iterable
from types import TracebackType

import numpy as np

from tests.test_emulator.silicon.case import (
    DATA_TYPES,
    INTERLEAVES,
    SWIZZLES,
    Array,
    Case,
    TensorMap,
)

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_ERROR_LOG = 5  # CU_JIT_ERROR_LOG_BUFFER, followed by its size


class DriverError(Exception):
    """Driver call that did not return CUDA_SUCCESS; ``str`` begins with the error's name."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Gpu:
    """First GPU of the machine, with its primary context current."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        self._device = ctypes.c_int()
        self._modules: dict[str, ctypes.c_void_p] = {}
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(self._device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self.call("cuCtxSetCurrent", self._context)

    def __enter__(self) -> "Gpu":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._cuda.cuDevicePrimaryCtxRelease_v2(self._device)

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(status, ctypes.byref(text))
            raise DriverError((text.value or b"CUDA_ERROR_?").decode())

    def name(self) -> str:
        text = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", text, 128, self._device)
        return text.value.decode()

    def version(self) -> str:
        """CUDA version that the driver supports, such as ``13.0``."""
        number = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def encode(self, tensor_map: TensorMap, address: int) -> Array:
        """Descriptor for a tensor at ``address``, as encoded by the driver: 16 words."""
        rank = len(tensor_map.shape)
        storage = ctypes.create_string_buffer(128 + 64)
        start = -ctypes.addressof(storage) % 64
        steps = tensor_map.element_strides or (1,) * rank
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(ctypes.addressof(storage) + start),
            DATA_TYPES[tensor_map.data_type][0],
            ctypes.c_uint(rank),
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*tensor_map.shape),
            (ctypes.c_uint64 * max(rank - 1, 1))(*tensor_map.strides),
            (ctypes.c_uint32 * rank)(*tensor_map.box),
            (ctypes.c_uint32 * rank)(*steps),
            INTERLEAVES.index(tensor_map.interleave),
            SWIZZLES.index(tensor_map.swizzle),
            tensor_map.l2_promotion,
            int(tensor_map.nan_fill),
        )
        return np.frombuffer(storage.raw[start : start + 128], np.uint64).copy()

    def _function(self, case: Case) -> ctypes.c_void_p:
        if case.ptx not in self._modules:
            log = ctypes.create_string_buffer(8192)
            options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG + 1)
            values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
            module = ctypes.c_void_p()
            try:
                self.call(
                    "cuModuleLoadDataEx",
                    ctypes.byref(module),
                    case.ptx.encode() + b"\0",
                    2,
                    options,
                    values,
                )
            except DriverError as error:
                raise DriverError(f"{error}: {log.value.decode()}") from None
            self._modules[case.ptx] = module
        function = ctypes.c_void_p()
        self.call(
            "cuModuleGetFunction",
            ctypes.byref(function),
            self._modules[case.ptx],
            case.entry.encode(),
        )
        if case.dynamic_shared > 48 << 10:
            self.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, case.dynamic_shared)
        return function

    def allocate(self, array: Array) -> int:
        """Copy an array to fresh device memory; returns its address."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(array.nbytes, 256)))
        content = np.ascontiguousarray(array)
        self.call(
            "cuMemcpyHtoD_v2",
            address,
            ctypes.c_void_p(content.ctypes.data),
            ctypes.c_size_t(content.nbytes),
        )
        return address.value

    def free(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def launch(self, case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
        """Outputs of a case, and its maps' descriptors, with addresses relative to the arrays."""
        function = self._function(case)
        addresses = {n: self.allocate(a) for n, a in (*case.inputs.items(), *case.outputs.items())}
        held: list[object] = [ctypes.c_uint64(a) for a in addresses.values()]
        descriptors = {}
        for name, tensor_map in case.maps.items():
            base = addresses[tensor_map.array]
            words = self.encode(tensor_map, base + tensor_map.offset)
            held.append((ctypes.c_uint64 * 16)(*words.tolist()))
            words[0] -= np.uint64(base)
            descriptors[name] = words
        parameters = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))  # type: ignore[arg-type]
        attribute = _Attribute(_CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(*case.cluster))
        clustered = case.cluster != (1, 1, 1)
        config = _Config(
            (ctypes.c_uint * 3)(*case.grid),
            (ctypes.c_uint * 3)(*case.block),
            case.dynamic_shared,
            None,
            ctypes.pointer(attribute) if clustered else None,
            int(clustered),
        )
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, parameters, None)
        self.call("cuCtxSynchronize")
        results = {}
        for name, initial in case.outputs.items():
            result = np.empty_like(initial, order="C")
            self.call(
                "cuMemcpyDtoH_v2",
                ctypes.c_void_p(result.ctypes.data),
                ctypes.c_uint64(addresses[name]),
                ctypes.c_size_t(result.nbytes),
            )
            results[name] = result
        self.free(addresses.values())
        return results, descriptors
