"""A kernel that writes a batch's groups, in place of routing, for the following products."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Array, Int32
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.runtime.compile import launch


class CopyArguments(NamedTuple):
    """int32 [count], copied from ``source`` to ``target``."""

    source: cute.Pointer
    target: cute.Pointer
    count: Int32


@dataclass(frozen=True)
class Copy:
    """Copy by one warp, which releases the next launch immediately."""

    def signature(self) -> tuple[CopyArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        return (example(CopyArguments, dict.fromkeys(("source", "target"), Int32), alignment=4),)

    @cute.jit
    def __call__(self, arguments: CopyArguments, stream: cuda_driver.CUstream) -> None:
        self.kernel(arguments).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, arguments: CopyArguments) -> None:
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        source, target = (Array(p, shape=(1,)) for p in (arguments.source, arguments.target))
        for index in cutlass.range(cute.arch.lane_idx(), arguments.count, 32):
            target.store(source.load(index), index)


def on_device(groups: Tensor) -> Tensor:
    """Copy of ``groups`` on the device, written by a launch."""
    written = torch.empty_like(groups)
    launch(Copy(), CopyArguments(groups, written, groups.numel()))
    return written
