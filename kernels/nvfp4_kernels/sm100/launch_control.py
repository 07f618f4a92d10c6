"""Work tiles of CTAs that have not started: a CTA that is there already takes them over."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import AddressSpace, Array, Boolean, Int32, Int64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.mbarrier import wait

RESPONSE_BYTES = 16


@dataclass(frozen=True)
class LaunchControl:
    """Requests for the grid's next CTA, one at a time, and their responses in shared memory.

    One warp asks, as soon as all warps know the work tile before; every warp of the CTA reads the
    response. A CTA whose launch is cancelled so never starts (PTX ISA, clusterlaunchcontrol). Work
    is thus handed out in the order of the grid, to whoever is free first, and the set-up and the
    start of a CTA's work hide behind the end of the work before.

    Attributes:
        response: 16 bytes.
        full: mbarrier: the response is there; 1 arrival.
        empty: mbarrier: all warps have read it; an arrival of each.
    """

    response: Array
    full: Array
    empty: Array

    @staticmethod
    def allocate() -> "LaunchControl":
        """Shared memory for a response and its barriers."""
        response = Array(Int32, RESPONSE_BYTES // 4, space=AddressSpace.smem, alignment=16)
        full, empty = (Array(Int64, 1, space=AddressSpace.smem, alignment=8) for _ in range(2))
        return LaunchControl(response, full, empty)

    def init(self, warps: int) -> None:
        """Initialise the barriers for a CTA of so many warps; the caller fences."""
        ptx.mbarrier_init(self.full, 1)
        ptx.mbarrier_init(self.empty, warps)

    @cute.jit
    def request(self, turn: Int32) -> None:
        """Ask for the CTA that the ``turn``-th response is to name; one warp calls this."""
        wait(self.empty, turn - 1)
        if ptx.elect_sync():
            ptx.mbarrier_arrive_expect_tx(self.full, RESPONSE_BYTES)
            ptx.clusterlaunchcontrol_try_cancel(self.response.data_ptr(), self.full.data_ptr())

    @cute.jit
    def take(self, turn: Int32) -> tuple[Boolean, tuple[Int32, Int32, Int32]]:
        """Whether there is another CTA to take over, and its index in the grid.

        Every warp calls this once for each request.
        """
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
        if ptx.elect_sync():
            ptx.mbarrier_arrive(self.empty)
        return found != 0, (x, y, z)
