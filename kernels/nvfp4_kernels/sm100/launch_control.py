"""Work of CTAs that have not started: a CTA that is there already takes it over."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import AddressSpace, Array, Boolean, Int32, Int64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.mbarrier import wait

RESPONSE_BYTES = 16


@dataclass(frozen=True)
class LaunchControl:
    """Requests of one warp for the grid's next CTA, one at a time.

    A CTA whose launch is cancelled so never starts (PTX ISA, clusterlaunchcontrol). Work is thus
    handed out in the order of the grid, to whoever is free first.

    Attributes:
        response: 16 bytes of shared memory, for which others have no use.
        full: mbarrier of one arrival: the response is there.
    """

    response: Array
    full: Array

    @staticmethod
    def allocate() -> "LaunchControl":
        """Shared memory for a response and its barrier."""
        response = Array(Int32, RESPONSE_BYTES // 4, space=AddressSpace.smem, alignment=16)
        return LaunchControl(response, Array(Int64, 1, space=AddressSpace.smem, alignment=8))

    def init(self) -> None:
        """Initialise the barrier; the caller fences."""
        ptx.mbarrier_init(self.full, 1)

    @cute.jit
    def request(self) -> None:
        """Ask for a CTA, once the response before has been taken."""
        if ptx.elect_sync():
            ptx.mbarrier_arrive_expect_tx(self.full, RESPONSE_BYTES)
            ptx.clusterlaunchcontrol_try_cancel(self.response.data_ptr(), self.full.data_ptr())

    def take(self, turn: Int32) -> tuple[Boolean, Int32, Int32, Int32]:
        """Whether the ``turn``-th request has brought a CTA, and its index in the grid."""
        wait(self.full, turn)
        found, x, y, z = ptx.inline_ptx(
            "{ .reg .b128 response; .reg .pred taken; ld.shared.b128 response, [{$r0}]; "
            "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 taken, response; "
            "mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
            "@taken clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 {$w1}, response; "
            "@taken clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 {$w2}, response; "
            "@taken clusterlaunchcontrol.query_cancel.get_first_ctaid::z.b32.b128 {$w3}, response; "
            "selp.b32 {$w0}, 1, 0, taken; }",
            write_only_types=[Int32] * 4,
            read_only_args=[self.response.data_ptr().toint(Int32)],
        )
        # The next response, which the async proxy writes, comes after these reads.
        ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        return found != 0, x, y, z
