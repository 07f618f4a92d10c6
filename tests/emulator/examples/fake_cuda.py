"""Stand-ins for CUDA's Python bindings, and for the CuTe helpers that use the bindings."""

import ctypes
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver
from cuda.bindings import runtime as cudart

from tests.emulator.findings import CooperativeLaunchTooLarge
from tests.emulator.runtime.shim import Runtime


class HardwareInfo:
    """Description of the emulated chip, in place of ``cutlass.utils.HardwareInfo``.

    Attributes:
        sms: number of streaming multiprocessors; a small number makes persistent kernels process
            several tiles per CTA.
    """

    sms = 148

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def get_max_active_clusters(self, cluster_size: int, *args: object, **kwargs: object) -> int:
        return max(1, self.sms // cluster_size)

    def get_device_multiprocessor_count(self) -> int:
        return self.sms

    def get_l2_cache_size_in_bytes(self) -> int:
        return 126 * 2**20


def _benchmark(call: Callable[..., Any], **options: Any) -> float:
    """Stand-in for ``cutlass.testing.benchmark``: runs the kernel once, measures nothing."""
    arguments = options.get("kernel_arguments")
    if arguments is not None:
        call(*arguments.args, **arguments.kwargs)
    return 1.0


class _Heap:
    """Stand-in for cudaMalloc and cudaFree, with host memory."""

    def __init__(self) -> None:
        self._blocks: dict[int, Any] = {}

    def allocate(self, nbytes: int) -> int:
        import torch

        block = torch.empty(nbytes, dtype=torch.uint8)
        self._blocks[block.data_ptr()] = block
        return int(block.data_ptr())

    def free(self, address: int) -> None:
        del self._blocks[int(address)]


def install(runtime: Runtime, sms: int) -> None:
    """Patch CUDA's Python bindings and CuTe in this process.

    Args:
        runtime: the installed runtime, whose errors CuTe's calls raise.
        sms: number of streaming multiprocessors that CuTe's ``HardwareInfo`` reports.
    """
    import cutlass.cute.testing
    import cutlass.testing
    import cutlass.utils
    import cutlass.utils.hardware_info
    from cutlass.base_dsl.jit_executor import JitCompiledFunction, JitExecutor
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    done = driver.CUresult.CUDA_SUCCESS
    ok = cudart.cudaError_t.cudaSuccess
    heap = _Heap()

    def copy(target: Any, source: Any, nbytes: int, *rest: object) -> tuple[Any]:
        ctypes.memmove(int(target), int(source), nbytes)
        return (done,)

    def synchronise(result: Any) -> Callable[..., tuple[Any]]:
        def wait(*streams: Any) -> tuple[Any]:
            runtime.device.synchronise()
            return (result,)

        return wait

    def memset(address: Any, value: int, nbytes: int, *rest: object) -> tuple[Any]:
        ctypes.memset(int(address), value, nbytes)
        return (ok,)

    def free(address: Any) -> tuple[Any]:
        heap.free(address)
        return (ok,)

    of_driver: dict[str, Any] = {
        "cuInit": lambda *a: (done,),
        "cuDeviceGetCount": lambda *a: (done, 1),
        "cuDeviceGet": lambda *a: (done, 0),
        "cuCtxGetCurrent": lambda *a: (done, 0),
        "cuCtxCreate": lambda *a: (done, 0),
        "cuDriverGetVersion": lambda *a: (done, 13000),
        "cuStreamCreate": lambda *a: (done, driver.CUstream(0)),
        "cuStreamSynchronize": synchronise(done),
        "cuCtxSynchronize": synchronise(done),
        "cuMemcpyDtoDAsync": copy,
        "cuMemcpyDtoHAsync": copy,
        "cuMemcpyHtoDAsync": copy,
    }
    of_runtime: dict[str, Any] = {
        "cudaGetDeviceCount": lambda *a: (ok, 1),
        "cudaGetDevice": lambda *a: (ok, 0),
        "cudaSetDevice": lambda *a: (ok,),
        "cudaStreamCreate": lambda *a: (ok, cudart.cudaStream_t(0)),
        "cudaStreamSynchronize": synchronise(ok),
        "cudaDeviceSynchronize": synchronise(ok),
        "cudaLibraryUnload": lambda *a: (ok,),
        "cudaMalloc": lambda nbytes: (ok, heap.allocate(nbytes)),
        "cudaFree": free,
        "cudaMemset": memset,
    }
    for bindings, functions in ((driver, of_driver), (cudart, of_runtime)):
        for name, function in functions.items():
            setattr(bindings, name, function)

    HardwareInfo.sms = sms
    cutlass.utils.HardwareInfo = HardwareInfo
    cutlass.utils.hardware_info.HardwareInfo = HardwareInfo
    for module in (cutlass.testing, cutlass.cute.testing):
        module.benchmark = _benchmark
        module.get_workspace_count = lambda *a, **k: 1
    CudaDialectJitCompiledFunction.num_devices = 1
    for executor in (JitExecutor, JitCompiledFunction):
        executor.run_compiled_program = _raising(runtime, executor.run_compiled_program)


def _raising(runtime: Runtime, run_compiled: Callable[..., Any]) -> Callable[..., Any]:
    from cutlass.base_dsl.common import DSLCudaRuntimeError

    def run_raising(self: Any, arguments: list[Any]) -> Any:
        try:
            with runtime.raising():
                return run_compiled(self, arguments)
        except CooperativeLaunchTooLarge as refused:  # an error that an example expects
            code = cudart.cudaError_t.cudaErrorCooperativeLaunchTooLarge
            raise DSLCudaRuntimeError(code, code.name) from refused

    return run_raising
