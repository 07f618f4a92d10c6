"""Kernels that report the addresses at which CuTe DSL places shared arrays."""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_ptr
from cutlass.memory.smem import SmemAllocator, SmemPartition

# Type, elements and alignment of each. The third is never touched, the last only in a branch.
ARRAYS = (
    (Int64, 3, 8),
    (Uint8, 5000, 1024),
    (Float32, 7, 4),
    (Uint8, 1, 1),
    (Float32, 33, 128),
    (Int32, 1, 16),
)
UNTOUCHED, IN_A_BRANCH = 2, len(ARRAYS) - 1


@dataclass(frozen=True)
class Placing:
    """Kernel for ``nvfp4_kernels.runtime.compile.launch``: array addresses, with one write each.

    In array number ``array``, the write goes ``beyond`` elements past the last element.
    """

    array: int = 0
    beyond: int = 0

    def signature(self) -> tuple[Any, ...]:
        return (make_ptr(Int32, 16, cute.AddressSpace.gmem, assumed_align=4),)

    @cute.jit
    def __call__(self, out: cute.Pointer, stream: cuda_driver.CUstream) -> None:
        self.kernel(out).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Pointer) -> None:
        found = Array(out, shape=(len(ARRAYS),))
        thread = cute.arch.thread_idx()[0]
        for number in cutlass.range_constexpr(IN_A_BRANCH):
            self._place(number, thread, found)
        if thread == 1:
            self._place(IN_A_BRANCH, thread - 1, found)

    @cute.jit
    def _place(self, number: cutlass.Constexpr, thread: Int32, found: Array) -> None:
        dtype, count, alignment = ARRAYS[number]
        array = Array(dtype, count, space=AddressSpace.smem, alignment=alignment)
        last = count - 1 + (self.beyond if number == self.array else 0)
        if thread == 0 and cutlass.const_expr(number != UNTOUCHED):
            array.store(dtype(1), last)
            found.store(Int32(array.data_ptr().toint()), number)


@dataclass(frozen=True)
class Large:
    """Kernel with one array of ``nbytes``, which CuTe may have placed before all others."""

    nbytes: int
    reserved: bool = False

    def signature(self) -> tuple[Any, ...]:
        return (make_ptr(Int32, 16, cute.AddressSpace.gmem, assumed_align=4),)

    @cute.jit
    def __call__(self, out: cute.Pointer, stream: cuda_driver.CUstream) -> None:
        self.kernel(out).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Pointer) -> None:
        partition = SmemPartition.RESERVED if self.reserved else SmemPartition.USER
        pointer = SmemAllocator().allocate_array(Uint8, self.nbytes, partition=partition)
        Array(pointer, shape=(self.nbytes,)).store(Uint8(1), self.nbytes - 1)
        Array(out, shape=(1,)).store(Int32(1), 0)
