"""Launch of the GEMM on torch tensors; each variant is compiled once, for the installed runtime."""

import functools
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_ptr

from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor
from tests.emulator.runtime import shim
from tests.test_emulator.kernels.config import GemmConfig, Shape
from tests.test_emulator.kernels.nvfp4_gemm import Nvfp4Gemm

_TYPES = {
    torch.uint8: cutlass.Uint8,
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.float32: cutlass.Float32,
}


def _pointer(address: int, dtype: torch.dtype) -> Any:
    """Example pointer to global memory, as a CPU tensor's pointer would have the generic space."""
    return make_ptr(_TYPES[dtype], address, cute.AddressSpace.gmem, assumed_align=16)


@functools.cache
def _compiled(config: GemmConfig, dtype: torch.dtype) -> Any:
    nowhere = [_pointer(16, torch.uint8)] * 4 + [_pointer(16, dtype)]
    sizes = [cutlass.Int32(0)] * 4
    kernel = Nvfp4Gemm(config, _TYPES[dtype])
    compiled = cute.compile(kernel, *nowhere, *sizes, cuda_driver.CUstream(0))
    runtime = shim.installed()
    return compiled if runtime is None else runtime.bind(compiled)


def multiply(a: Nvfp4Tensor, b: Nvfp4Tensor, c: torch.Tensor, shape: Shape) -> None:
    """Compute C [M, N] = A [M, K] · B [N, K]ᵀ without global scales; block scales are blocked."""
    operands = [a.data, a.scales.view(torch.uint8), b.data, b.scales.view(torch.uint8), c]
    pointers = [_pointer(tensor.data_ptr(), tensor.dtype) for tensor in operands]
    sizes = [shape.m, shape.n, shape.k, shape.sms]
    _compiled(shape.config, c.dtype)(*pointers, *sizes, cuda_driver.CUstream(0))
