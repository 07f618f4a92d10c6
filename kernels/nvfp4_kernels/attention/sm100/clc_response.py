"""Cluster launch control (CLC): a running CTA takes the work of CTAs that have not started."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import AddressSpace, Array, Boolean, Int32, Int64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.mbarrier import wait

RESPONSE_BYTES = 16
_QUERY = "clusterlaunchcontrol.query_cancel"
# An index is defined only of a CTA that was cancelled.
_TAKE = "\n".join((
    "{ .reg .b128 response; .reg .pred taken;",
    "ld.shared.b128 response, [{$r0}];",
    f"{_QUERY}.is_canceled.pred.b128 taken, response;",
    "selp.b32 {$w0}, 1, 0, taken;",
    *(
        f"mov.b32 {{$w{number}}}, 0;\n"
        f"@taken {_QUERY}.get_first_ctaid::{axis}.b32.b128 {{$w{number}}}, response;"
        for number, axis in enumerate("xyz", 1)
    ),
    "}",
))  # fmt: skip


@dataclass(frozen=True)
class ClcResponse:
    """CLC requests of a warp for the grid's next CTA, one in flight at a time.

    A CTA whose launch is cancelled never starts (PTX ISA, clusterlaunchcontrol); the requesting CTA
    takes the work tile. Work is thus distributed dynamically, in grid order.

    Attributes:
        response: 16 bytes of shared memory, for the CLC response alone.
        full: mbarrier of arrive count 1, completed by the response.
    """

    response: Array
    full: Array

    @staticmethod
    def allocate() -> "ClcResponse":
        """Allocate shared memory for a response and the barrier."""
        response = Array(Int32, RESPONSE_BYTES // 4, space=AddressSpace.smem, alignment=16)
        return ClcResponse(response, Array(Int64, 1, space=AddressSpace.smem, alignment=8))

    def init(self) -> None:
        """Initialise the barrier; the caller must fence."""
        ptx.mbarrier_init(self.full, 1)

    @cute.jit
    def request(self) -> None:
        """Request the next CTA; the previous response must have been taken."""
        if ptx.elect_sync():
            ptx.mbarrier_arrive_expect_tx(self.full, RESPONSE_BYTES)
            ptx.clusterlaunchcontrol_try_cancel(self.response.data_ptr(), self.full.data_ptr())

    def take(self, phase: Int32) -> tuple[Boolean, Int32, Int32, Int32]:
        """Wait for the ``phase``-th response and decode it.

        Returns:
            Whether a CTA was cancelled, and that CTA's index in the grid.
        """
        wait(self.full, phase)
        found, x, y, z = ptx.inline_ptx(
            _TAKE,
            write_only_types=[Int32] * 4,
            read_only_args=[self.response.data_ptr().toint(Int32)],
        )
        # The next response, which the async proxy writes, comes after these reads.
        ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        return found != 0, x, y, z
