"""Two CuTe DSL kernels, of which the second is launched as a dependent (``use_pdl``)."""

import functools
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Array, Int32
from cutlass.cute.runtime import make_ptr

from tests.emulator.runtime import shim

THREADS = 128


@cute.kernel
def _square(x: cute.Pointer, y: cute.Pointer) -> None:
    cute.arch.griddepcontrol_launch_dependents()
    index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    value = Array(x, shape=(index + 1,))[index]
    Array(y, shape=(index + 1,))[index] = value * value


@cute.kernel
def _add(x: cute.Pointer, y: cute.Pointer, waits: cutlass.Constexpr) -> None:
    index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    constant = Array(x, shape=(index + 1,))[index]  # no kernel writes it
    if cutlass.const_expr(waits):
        cute.arch.griddepcontrol_wait()
    squares = Array(y, shape=(index + 1,))
    squares[index] = squares[index] + constant


@cute.jit
def _launch(
    x: cute.Pointer,
    y: cute.Pointer,
    ctas: Int32,
    stream: cuda_driver.CUstream,
    waits: cutlass.Constexpr,
    use_pdl: cutlass.Constexpr,
) -> None:
    grid, block = (ctas, 1, 1), (THREADS, 1, 1)
    _square(x, y).launch(grid=grid, block=block, stream=stream, use_pdl=use_pdl)
    _add(x, y, waits).launch(grid=grid, block=block, stream=stream, use_pdl=use_pdl)


def _pointer(address: int) -> Any:
    return make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=16)


@functools.cache
def _compiled(waits: bool, use_pdl: bool) -> Any:
    nowhere = [_pointer(16), _pointer(16), Int32(0), cuda_driver.CUstream(0)]
    compiled = cute.compile(_launch, *nowhere, waits, use_pdl)
    runtime = shim.installed()
    return compiled if runtime is None else runtime.bind(compiled)


def square_and_add(
    x: torch.Tensor, y: torch.Tensor, waits: bool = True, use_pdl: bool = True
) -> None:
    """Write x² + x to y, for int32 tensors of a multiple of ``THREADS`` elements.

    Args:
        x: input.
        y: output.
        waits: whether the second kernel waits for the first.
        use_pdl: whether both are launched with programmatic stream serialization.
    """
    stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else 0
    pointers = _pointer(x.data_ptr()), _pointer(y.data_ptr())
    ctas = Int32(x.numel() // THREADS)
    _compiled(waits, use_pdl)(*pointers, ctas, cuda_driver.CUstream(stream))
