"""The kernel of ``moe_dispatch`` on sm_90 and sm_100: any source, any sink."""

from dataclasses import dataclass

import cuda.bindings.driver as cuda_driver
import cutlass.cute as cute
from cutlass import Int32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.moe.dispatch.gather import Fp8TokenRows, GatheredRows
from nvfp4_kernels.moe.dispatch.ids import CtaRoute
from nvfp4_kernels.moe.dispatch.logits import TopkRoute
from nvfp4_kernels.moe.dispatch.quantize import MoeRows
from nvfp4_kernels.moe.dispatch.tokens import DispatchArguments, GivenTiles


@dataclass(frozen=True)
class MoeDispatch:
    """Copy or quantise tokens into the rows of tiles in use; padding rows are zeros.

    With ids or logits, every CTA sorts the batch in shared memory, then loops over a share of the
    rows of tiles in use; the last CTA of the grid writes the routing instead of rows.

    Attributes:
        source: existing tiles; or a sort, with or without top-k.
        rows: layout of the rows, and a thread's reads and writes.
    """

    source: GivenTiles | CtaRoute | TopkRoute
    rows: GatheredRows | Fp8TokenRows | MoeRows

    def signature(self) -> tuple[DispatchArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        source, rows = self.source, self.rows
        parts = source.arguments(), rows.tokens(), rows.arguments(source)
        return (DispatchArguments(*parts, Int32(0)),)

    @property
    def threads(self) -> int:
        """Number of threads per CTA."""
        return self.source.threads or self.rows.tile.threads

    @property
    def cluster(self) -> tuple[int, int, int] | None:
        """Extent of a cluster; None: CTAs are independent."""
        ctas = self.source.cluster
        return None if ctas is None else (ctas, 1, 1)

    @cute.jit
    def __call__(self, arguments: DispatchArguments, stream: cuda_driver.CUstream) -> None:
        """Launch a persistent grid; CTAs that share the top-k form clusters."""
        self.kernel(arguments).launch(
            grid=self.rows.grid(self.source, arguments.ctas),
            block=(self.threads, 1, 1),
            cluster=self.cluster,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: DispatchArguments) -> None:
        """Find the slot of each row, then copy or quantise this CTA's share of the rows."""
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        slots, used = self.source.place(arguments.source, arguments.tokens)
        self.rows.take_turns(self.source, arguments, slots, used)
        self.source.finish()
