"""torch with a simulated GPU: tensors "on cuda" are CPU tensors, transfers make copies."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.profiler
import torch.utils.dlpack
from torch.overrides import TorchFunctionMode

from tests.emulator.examples.scaled_mm import block_scaled_mm

_CUDA, _CPU = 2, 1  # DLDeviceType


def _is_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.split(":")[0] == "cuda"


class CudaIsCpu(TorchFunctionMode):
    """Mode that creates "cuda" tensors on the CPU; a move between the devices makes a copy."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        moved = any(_is_cuda(v) for v in (*args, *kwargs.values()))
        if moved:
            args = tuple(torch.device("cpu") if _is_cuda(a) else a for a in args)
            kwargs = {k: torch.device("cpu") if _is_cuda(v) else v for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        if func is torch.Tensor.to and moved and result is args[0]:
            return result.clone()
        return result


class Stream:
    """A CUDA stream without pending work."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def record_event(self, event: object = None) -> "Event":
        return Event()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None: ...


class Event:
    """A CUDA event; the time between any two is 1 ms."""

    cuda_event = 1

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


class Graph:
    """CUDA graph whose replay does nothing: the work ran once, at capture."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def replay(self) -> None: ...


class Profile:
    """Stand-in for ``torch.profiler.profile`` without any recorded event."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *error: object) -> None: ...
    def key_averages(self) -> "Profile":
        return self

    def table(self, *args: object, **kwargs: object) -> str:
        return ""


@contextlib.contextmanager
def _nothing(*args: object, **kwargs: object) -> Iterator[None]:
    yield


def _copy(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return tensor.clone()


def _on_cuda(dlpack: Callable[..., object]) -> Callable[..., object]:
    """Wrapper of ``__dlpack__`` whose capsules claim to hold GPU memory."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

    def export(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        capsule = dlpack(tensor.detach())
        # DLManagedTensor starts with DLTensor: data pointer, then the device's type.
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = _CUDA
        return capsule

    return export


def install(sms: int, arch: str = "sm_100a") -> None:
    """Patch torch in this process.

    Args:
        sms: number of streaming multiprocessors in the device properties.
        arch: "sm_100a" or "sm_90a", reported in the device properties.
    """
    properties = SimpleNamespace(
        name="emulated H200" if arch == "sm_90a" else "emulated B200",
        major=9 if arch == "sm_90a" else 10,
        minor=0,
        multi_processor_count=sms,
        total_memory=2**34,
        L2_cache_size=126 * 2**20,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448,
    )
    values: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "synchronize": lambda *a: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *a: None,
        "device": _nothing,
        "get_device_name": lambda *a: properties.name,
        "get_device_capability": lambda *a: (properties.major, 0),
        "get_device_properties": lambda *a: properties,
        "empty_cache": lambda: None,
        "Stream": Stream,
        "ExternalStream": Stream,
        "current_stream": lambda *a: Stream(),
        "default_stream": lambda *a: Stream(),
        "stream": _nothing,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": _nothing,
        "mem_get_info": lambda *a: (2**34, 2**34),
        "manual_seed": lambda *a: None,
        "manual_seed_all": lambda *a: None,
    }
    tensor: dict[str, Any] = {
        "cuda": _copy,
        "cpu": _copy,
        "is_cuda": True,
        "__dlpack__": _on_cuda(torch.Tensor.__dlpack__),
        "__dlpack_device__": lambda self: (_CUDA, 0),
    }
    dlpack = torch.utils.dlpack
    for owner, patches in (
        (torch.cuda, values),
        (torch.Tensor, tensor),
        (dlpack, {"to_dlpack": _on_cuda(vars(dlpack)["to_dlpack"])}),
        (torch._C, {"_cuda_getCurrentRawStream": lambda device: 0}),
        # torch before 2.10 has no scaled_grouped_mm, which only GPUs support: examples then do
        # without.
        (torch, {"_scaled_mm": block_scaled_mm, "__version__": "2.9.0"}),
        (torch.profiler, {"profile": Profile}),
    ):
        for name, value in patches.items():
            setattr(owner, name, value)
    # TVM FFI prefers this C table to DLPack in Python.
    del torch.Tensor.__dlpack_c_exchange_api__
    CudaIsCpu().__enter__()
