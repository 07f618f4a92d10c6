"""Entry points of the library, called as by host code, with a recording device."""

import ctypes
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulator.examples.recorder import Recorder
from tests.emulator.findings import (
    CooperativeLaunchTooLarge,
    DataRace,
    IllegalInstruction,
    LaunchError,
)
from tests.emulator.runtime.attributes import UnmodelledCall, decode_launch_attributes
from tests.emulator.runtime.driver import COOPERATIVE_LAUNCH_TOO_LARGE, Driver
from tests.emulator.runtime.fatbin import with_ptx
from tests.emulator.runtime.library import Library, build
from tests.emulator.tma.element_type import ElementType
from tests.emulator.tma.swizzle import Swizzle
from tests.emulator.tma.tensor_map import TensorMap, decode
from tests.test_emulator.test_runtime_fatbin import ELF

PTX = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry first(.param .u64 a, .param .align 64 .b8 b[128], .param .u32 c)
{
  .shared .align 16 .b8 buffer[256];
  .local .align 16 .b8 spilled[64];
  ret;
}
.visible .entry second()
{
  ret;
}
"""
MAX_DYNAMIC, NON_PORTABLE = 8, 14


class Host:
    """Host code that calls entry points and keeps their arguments alive."""

    def __init__(self, library: Any, driver: Driver) -> None:
        self.library = library
        self.driver = driver
        self.image = ctypes.create_string_buffer(with_ptx(ELF, PTX))

    def call(self, name: str, *arguments: object) -> int:
        return int(getattr(self.library, name)(*arguments))

    def check(self, name: str, *arguments: object) -> None:
        """Call an entry point, and raise its pending error."""
        code = self.call(name, *arguments)
        pending = self.driver.take_pending()
        if pending is not None:
            assert code != 0
            raise pending
        assert code == 0

    def load(self) -> ctypes.c_void_p:
        library = ctypes.c_void_p()
        self.check(
            "_cudaLibraryLoadData", ctypes.byref(library), self.image, None, None, 0, None, None, 0
        )
        return library

    def kernel(self, name: str) -> ctypes.c_void_p:
        kernel = ctypes.c_void_p()
        self.check("_cudaLibraryGetKernel", ctypes.byref(kernel), self.load(), name.encode())
        return kernel

    def launch(
        self,
        kernel: ctypes.c_void_p,
        attributes: bytes = b"",
        shared: int = 0,
        stream: int = 0,
    ) -> None:
        records = ctypes.create_string_buffer(attributes, max(1, len(attributes)))
        config = struct.pack(
            "<6I3QI",
            *(2, 3, 4, 32, 2, 1),
            shared,
            stream,
            ctypes.addressof(records),
            len(attributes) // 72,
        )
        values = [b"\x01" * 8, b"\x02" * 128, b"\x03" * 4]
        self.values = [ctypes.create_string_buffer(v, len(v)) for v in values]
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(v) for v in self.values))
        self.check("_cudaLaunchKernelEx", config, kernel, pointers)


def attribute(identity: int, value: bytes) -> bytes:
    return struct.pack("<I4x", identity) + value.ljust(64, b"\0")


@pytest.fixture
def device() -> Recorder:
    return Recorder()


@pytest.fixture
def host(device: Recorder) -> Iterator[Host]:
    library = Library(build(), ctypes.RTLD_LOCAL)
    driver = Driver(device, (10, 0), library.set_detail)
    with library.lent_to(driver.dispatch) as entry_points:
        yield Host(entry_points, driver)


def test_a_launch_arrives_with_everything(host: Host, device: Recorder) -> None:
    cluster = attribute(4, struct.pack("<III", 2, 1, 1))
    pdl = attribute(6, struct.pack("<i", 1))
    preferred = attribute(11, struct.pack("<III", 4, 1, 1))
    records = cluster + pdl + attribute(0, b"") + preferred
    host.launch(host.kernel("first"), records, shared=1024, stream=7)
    assert device.launches == [
        {
            "module": 0,
            "kernel": "first",
            "grid": (2, 3, 4),
            "block": (32, 2, 1),
            "cluster": (2, 1, 1),
            "dynamic_shared": 1024,
            "parameter_bytes": [8, 128, 4],
            "attributes": {
                "programmatic_stream_serialization": 1,
                "preferred_cluster_x": 4,
                "preferred_cluster_y": 1,
                "preferred_cluster_z": 1,
            },
            "stream": 7,
        }
    ]


def test_parameters_are_read_by_their_declared_size(host: Host, device: Recorder) -> None:
    seen: list[bytes] = []
    device.launch = lambda *a, **k: seen.extend(a[6])  # type: ignore[method-assign]
    host.launch(host.kernel("first"))
    assert seen == [b"\x01" * 8, b"\x02" * 128, b"\x03" * 4]


def test_the_plain_launch_arrives_too(host: Host, device: Recorder) -> None:
    call = host.library._cudaLaunchKernel
    call.argtypes = [ctypes.c_void_p, *[ctypes.c_int32] * 6, *[ctypes.c_void_p] * 3]
    host.check("_cudaLaunchKernel", host.kernel("second"), 5, 1, 1, 64, 1, 1, None, 16, 9)
    assert device.launches[0]["grid"] == (5, 1, 1)
    assert device.launches[0]["block"] == (64, 1, 1)
    assert device.launches[0]["dynamic_shared"] == 16
    assert device.launches[0]["stream"] == 9


def test_waiting_for_a_stream_reaches_the_device(host: Host, device: Recorder) -> None:
    waited: list[int | None] = []
    device.synchronise = lambda stream=None: waited.append(stream)  # type: ignore[method-assign]
    host.check("_cudaStreamSynchronize", ctypes.c_void_p(7))
    host.check("_cudaDeviceSynchronize")
    assert waited == [7, None]


def test_an_exception_crosses_the_host_code_unharmed(host: Host, device: Recorder) -> None:
    race = DataRace("two writes")

    def fail(*arguments: object, **options: object) -> None:
        raise race

    device.launch = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(DataRace) as caught:
        host.launch(host.kernel("first"))
    assert caught.value is race
    assert host.driver.pending is None


def test_a_cooperative_launch_that_does_not_fit_has_an_error_of_its_own() -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise CooperativeLaunchTooLarge("too large")

    device = Recorder()
    device.synchronise = fail  # type: ignore[method-assign]
    driver = Driver(device, (10, 0), lambda detail: None)
    assert driver.dispatch(b"_cudaDeviceSynchronize", [], 0) == COOPERATIVE_LAUNCH_TOO_LARGE == 720


def test_events_of_a_launch_come_with_their_flags() -> None:
    records = attribute(7, struct.pack("<Qi", 1, 2)) + attribute(12, struct.pack("<Qi", 1, 3))
    named = {"programmatic_event": 2, "launch_completion_event": 3}
    assert decode_launch_attributes(records) == ((1, 1, 1), named)


def test_exceptions_stay_in_their_thread(host: Host) -> None:
    thread = threading.Thread(target=host.call, args=("_cudaMalloc",))
    thread.start()
    thread.join()
    assert host.driver.pending is None


def test_an_exception_that_nobody_took_does_not_hide_the_next(host: Host) -> None:
    host.call("_cudaMalloc")
    host.call("_cudaSetDevice", 7)
    assert "device 7" in str(host.driver.take_pending())


@pytest.mark.parametrize(
    "name", ["_cudaMalloc", "_cudaStreamBeginCapture", "CuteDSLRT_Module_Create_From_Bytes"]
)
def test_what_is_not_modelled_fails_by_its_name(host: Host, name: str) -> None:
    assert host.call(name) == 801
    with pytest.raises(UnmodelledCall, match=f"{name}: the emulator's runtime does not model it"):
        host.check(name)


def test_every_entry_point_of_cutes_library_is_there() -> None:
    nvidia = pytest.importorskip("nvidia_cutlass_dsl")
    (theirs,) = Path(nvidia.__path__[0]).glob("cu*/lib/libcute_dsl_runtime.so")

    def exported(path: Path) -> set[str]:
        command = ["nm", "-D", "--defined-only", "--format=just-symbols", str(path)]
        return set(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        )

    assert exported(theirs) <= exported(build())


@pytest.mark.parametrize(
    ("identity", "name"), [(1, "access_policy_window"), (9, "mem_sync_domain_map")]
)
def test_an_attribute_that_cannot_be_honoured_is_named(
    host: Host, identity: int, name: str
) -> None:
    with pytest.raises(UnmodelledCall, match=f"launch attribute {name}"):
        host.launch(host.kernel("first"), attribute(identity, b""))


def test_an_unknown_attribute_is_an_error() -> None:
    with pytest.raises(LaunchError, match="launch attribute 99: unknown"):
        decode_launch_attributes(attribute(99, b""))


def test_dynamic_shared_memory_has_to_be_allowed_first(host: Host, device: Recorder) -> None:
    kernel = host.kernel("first")
    with pytest.raises(LaunchError, match="65536 bytes, first is allowed 49152"):
        host.launch(kernel, shared=65536)
    host.check("_cudaFuncSetAttribute", kernel, MAX_DYNAMIC, 65536)
    host.launch(kernel, shared=65536)
    with pytest.raises(LaunchError, match="has 232192"):  # 227 KiB without the static 256 bytes
        host.check("_cudaKernelSetAttributeForDevice", kernel, MAX_DYNAMIC, 232193, 0)
    with pytest.raises(UnmodelledCall, match="setting kernel attribute 9"):
        host.check("_cudaFuncSetAttribute", kernel, 9, 0)


def test_large_clusters_have_to_be_allowed_first(host: Host, device: Recorder) -> None:
    kernel, sixteen = host.kernel("first"), attribute(4, struct.pack("<III", 16, 1, 1))
    with pytest.raises(LaunchError, match="16 CTAs, first does not allow more than 8"):
        host.launch(kernel, sixteen)
    host.check("_cudaFuncSetAttribute", kernel, NON_PORTABLE, 1)
    host.launch(kernel, sixteen)
    assert device.launches[0]["cluster"] == (16, 1, 1)


def test_questions_about_device_and_kernel(host: Host) -> None:
    value = ctypes.c_int32()
    where = ctypes.byref(value)
    for number, expected in {16: 148, 97: 232448, 75: 10, 76: 0}.items():
        host.check("_cudaDeviceGetAttribute", where, number, 0)
        assert value.value == expected
    host.check("_cuKernelGetAttribute", where, 1, host.kernel("first"), 0)
    assert value.value == 256
    host.check("_cudaLibraryGetKernelCount", where, host.load())
    assert value.value == 2
    call = host.library._cudaOccupancyMaxActiveBlocksPerMultiprocessor
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64]
    host.check(call.__name__, where, host.kernel("first"), 256, 100_000)
    assert value.value == 2  # shared memory; threads alone would allow 8
    with pytest.raises(UnmodelledCall, match="device attribute 13"):
        host.check("_cudaDeviceGetAttribute", where, 13, 0)
    with pytest.raises(UnmodelledCall, match="kernel attribute 4"):
        host.check("_cuKernelGetAttribute", where, 4, host.kernel("first"), 0)
    with pytest.raises(LaunchError, match="device 1"):
        host.check("_cudaDeviceGetAttribute", where, 16, 1)


def test_handles_are_checked(host: Host) -> None:
    with pytest.raises(LaunchError, match=r"the library has \['first', 'second'\]"):
        host.kernel("third")
    with pytest.raises(LaunchError, match="not a loaded kernel"):
        host.launch(ctypes.c_void_p(0x1234))
    library = host.load()
    host.check("_cudaLibraryUnload", library)
    with pytest.raises(LaunchError, match="not a loaded library"):
        host.check("_cudaLibraryUnload", library)


def test_an_image_without_ptx_says_what_to_do(host: Host) -> None:
    host.image = ctypes.create_string_buffer(ELF)
    with pytest.raises(ValueError, match="compile the kernel again after installing"):
        host.load()


def encode(host: Host, *, rank: int = 2, swizzle: int = 2, element_type: int = 6) -> bytes:
    result = ctypes.create_string_buffer(128)
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    pointers = [ctypes.c_void_p(0x10000), (u64 * 2)(64, 8), (u64 * 1)(144), (u32 * 2)(32, 4)]
    host.check(
        "_cuTensorMapEncodeTiled",
        result,
        element_type,
        rank,
        *pointers,
        (u32 * 2)(1, 2),
        0,
        swizzle,
        2,
        1,
    )
    return result.raw


def test_tensor_maps_are_encoded(host: Host) -> None:
    assert decode(encode(host)) == TensorMap(
        element_type=ElementType.F16,
        address=0x10000,
        dims=(64, 8),
        strides=(144,),
        box=(32, 4),
        element_strides=(1, 2),
        swizzle=Swizzle.B64,
        l2_promotion=2,
        nan_fill=True,
    )


def test_tensor_maps_that_the_driver_refuses(host: Host) -> None:
    with pytest.raises(LaunchError, match="rank 6"):
        encode(host, rank=6)
    with pytest.raises(LaunchError, match="swizzle 9"):
        encode(host, swizzle=9)
    with pytest.raises(LaunchError, match="data type 40"):
        encode(host, element_type=40)
    with pytest.raises(IllegalInstruction, match="box"):
        encode(host, swizzle=1)  # 64 bytes of a row do not fit a swizzle of 32


def test_nothing_is_launched_with_a_tensor_map_that_was_refused(
    host: Host, device: Recorder
) -> None:
    """The next launch raises the driver's pending error, where CUDA's host code would abort."""
    kernel = host.kernel("first")
    with pytest.raises(IllegalInstruction, match="box") as caught:
        encode(host, swizzle=1)
    host.driver._local.refused_map = caught.value
    with pytest.raises(IllegalInstruction, match="box"):
        host.launch(kernel)
    host.launch(kernel)


def test_a_library_is_initialised_once(host: Host) -> None:
    calls: list[str] = []
    init_type = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
    load_type = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int32)
    raise_type = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
    codes = {"load": 719}

    def init(state: Any) -> int:
        calls.append("init")
        state[0] = 42
        return 0

    def load(state: Any, device: int) -> int:
        calls.append(f"load {device}")
        return codes["load"]

    functions = (
        init_type(init),
        load_type(load),
        raise_type(lambda kind, text: calls.append(f"{kind.decode()}: {text.decode()[:20]}")),
    )
    state = ctypes.c_void_p()
    once = host.library.cuda_dialect_init_library_once
    assert once(ctypes.byref(state), *functions) == 719
    assert calls == ["init", "load 0", "EmulatorError: CUDA Error Code: 719"]
    assert state.value is None
    codes["load"] = 0
    calls.clear()
    assert once(ctypes.byref(state), *functions) == 0
    assert once(ctypes.byref(state), *functions) == 0
    assert calls == ["init", "load 0"]
