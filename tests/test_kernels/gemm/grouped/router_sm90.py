"""A stand-in for the routing kernel: copies ``groups`` and releases the next kernel."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.arguments import example


class RouterArguments(NamedTuple):
    """``count`` words, copied from ``source`` to ``groups``."""

    source: cute.Pointer
    groups: cute.Pointer
    count: Int32


@dataclass(frozen=True)
class Router:
    """Copy by one warp."""

    def signature(self) -> tuple[RouterArguments]:
        return (example(RouterArguments, {"source": Int32, "groups": Int32}),)

    @cute.jit
    def __call__(self, arguments: RouterArguments, stream: cuda_driver.CUstream) -> None:
        self.kernel(arguments).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, arguments: RouterArguments) -> None:
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        source, groups = (Array(each, shape=(1,)) for each in (arguments.source, arguments.groups))
        for at in cutlass.range(cute.arch.lane_idx(), arguments.count, 32, unroll=1):
            groups.store(source.load(at), at)
