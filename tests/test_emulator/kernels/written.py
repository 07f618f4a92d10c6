"""Small PTX kernels of which mutants are made, in addition to those of test_machine_hazards.py."""

import numpy as np

from tests.emulator import Schedule
from tests.test_emulator import wgmma_kernel
from tests.test_emulator.assemble import Run, global_array

# Warp 0 writes tensor memory and warp 4, which reaches the same lanes, reads it; twice.
TENSOR = """
    mov.u32 %r2, smem;
    shr.u32 %r5, %r90, 5;
    setp.ne.u32 %p1, %r5, 0;
    setp.ne.u32 %p2, %r5, 4;
    and.b32 %r4, %r90, 31;
    mad.wide.u32 %rd1, %r4, 4, %rd90;
    mov.u32 %r6, 0;
    @%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
    bar.sync 0;
    ld.shared.u32 %r3, [%r2];
AGAIN:
    @%p1 bra WRITTEN;
    mad.lo.u32 %r7, %r6, 1000, %r90;
    tcgen05.fence::after_thread_sync;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r7};
    tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync;
WRITTEN:
    bar.sync 1, 160;
    @%p2 bra READ;
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r8}, [%r3];
    tcgen05.wait::ld.sync.aligned;
    st.global.u32 [%rd1], %r8;
    add.u64 %rd1, %rd1, 128;
    tcgen05.fence::before_thread_sync;
READ:
    bar.sync 2, 160;
    add.u32 %r6, %r6, 1;
    setp.lt.u32 %p3, %r6, 2;
    @%p3 bra AGAIN;
    @%p1 bra DONE;
    tcgen05.fence::after_thread_sync;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;
DONE:
"""

# Each thread copies 16 bytes per step into a ring of two steps and reads its neighbour's.
COPY = """
    mov.u32 %r2, smem;
    shl.b32 %r3, %r90, 4;
    xor.b32 %r5, %r3, 512;
    cvt.u64.u32 %rd3, %r3;
    add.u64 %rd1, %rd90, %rd3;
    add.u64 %rd2, %rd91, %rd3;
    mov.u32 %r6, 0;
    add.u32 %r4, %r2, %r3;
    cp.async.cg.shared.global [%r4], [%rd1], 16;
    cp.async.commit_group;
NEXT:
    xor.b32 %r3, %r3, 1024;
    add.u32 %r4, %r2, %r3;
    add.u64 %rd1, %rd1, 1024;
    setp.ge.u32 %p1, %r6, 3;
    @%p1 bra LAST;
    cp.async.cg.shared.global [%r4], [%rd1], 16;
LAST:
    cp.async.commit_group;
    cp.async.wait_group 1;
    bar.sync 0;
    add.u32 %r4, %r2, %r5;
    ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r4];
    st.global.v4.u32 [%rd2], {%r10, %r11, %r12, %r13};
    bar.sync 1;
    xor.b32 %r5, %r5, 1024;
    add.u64 %rd2, %rd2, 1024;
    add.u32 %r6, %r6, 1;
    setp.lt.u32 %p2, %r6, 4;
    @%p2 bra NEXT;
"""


# The first warpgroup releases registers, the other two acquire them.
BUDGET = """
    shr.u32 %r1, %r90, 7;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra TAKE;
    setmaxnreg.dec.sync.aligned.u32 40;
    bra SET;
TAKE:
    setmaxnreg.inc.sync.aligned.u32 232;
SET:
    mad.wide.u32 %rd1, %r90, 4, %rd90;
    st.global.u32 [%rd1], %r1;
"""

# Adds one to the preceding launch's result; the second warp waits by way of the first.
DEPENDENT = """
    griddepcontrol.launch_dependents;
    mad.wide.u32 %rd1, %r90, 4, %rd90;
    shr.u32 %r1, %r90, 5;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra WAITED;
    griddepcontrol.wait;
WAITED:
    bar.sync 0;
    ld.global.u32 %r2, [%rd1];
    add.u32 %r2, %r2, 1;
    st.global.u32 [%rd1], %r2;
"""

# Two CTAs on one SM, which exchange values that they keep in tensor memory.
NEIGHBOURS = """
    mov.u32 %r2, smem;
    mov.u32 %r8, %ctaid.x;
    xor.b32 %r9, %r8, 1;
    mad.wide.u32 %rd1, %r8, 128, %rd90;
    mad.wide.u32 %rd2, %r9, 128, %rd90;
    mad.wide.u32 %rd3, %r90, 4, %rd1;
    mad.wide.u32 %rd4, %r90, 4, %rd2;
    setp.ne.u32 %p1, %r90, 0;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 256;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    ld.shared.u32 %r3, [%r2];
    mad.lo.u32 %r7, %r8, 1000, %r90;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r7};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r3];
    tcgen05.wait::ld.sync.aligned;
    st.global.u32 [%rd3], %r4;
    bar.warp.sync -1;
    @%p1 bra POLL;
    st.release.gpu.global.u32 [%rd1+256], 1;
POLL:
    ld.acquire.gpu.global.u32 %r5, [%rd2+256];
    setp.eq.u32 %p2, %r5, 0;
    @%p2 bra POLL;
    ld.global.u32 %r6, [%rd4];
    st.global.u32 [%rd3+512], %r6;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 256;
"""

# Each launch adds one to the result of the launch before, through tensor memory, overlapped.
OVERLAPPED = """
    mov.u32 %r2, smem;
    mad.wide.u32 %rd1, %r90, 4, %rd90;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 512;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    ld.shared.u32 %r3, [%r2];
    griddepcontrol.launch_dependents;
    griddepcontrol.wait;
    ld.global.u32 %r7, [%rd1];
    add.u32 %r7, %r7, 1;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r7};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r3];
    tcgen05.wait::ld.sync.aligned;
    st.global.u32 [%rd1], %r4;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 512;
"""


def tensor(body: str, schedule: Schedule) -> None:
    out = global_array(np.zeros((2, 32), np.uint32))
    options = {"strict_tensor_fences": True}
    Run(block=160, schedule=schedule, options=options)(body, out, shared=16)
    np.testing.assert_array_equal(out, np.arange(32) + np.array([[0], [1000]]))


def copy(body: str, schedule: Schedule) -> None:
    data = global_array(np.arange(1024, dtype=np.uint32).reshape(4, 64, 4))
    out = global_array(np.zeros_like(data))
    Run(block=64, schedule=schedule)(body, data, out, shared=2048)
    np.testing.assert_array_equal(out, data[:, np.arange(64) ^ 32])


def budget(body: str, schedule: Schedule) -> None:
    out = global_array(np.zeros(384, np.uint32))
    Run(block=384, schedule=schedule)(body, out)
    np.testing.assert_array_equal(out, np.arange(384) // 128)


def dependent(body: str, schedule: Schedule) -> None:
    data = global_array(np.arange(64, dtype=np.uint32))
    Run(block=64, schedule=schedule, launches=3)(body, data)
    np.testing.assert_array_equal(data, np.arange(64) + 3)


def neighbours(body: str, schedule: Schedule) -> None:
    words = global_array(np.zeros((6, 32), np.uint32))
    options = {"strict_tensor_fences": True}
    Run(2, 32, schedule=schedule, resident=True, options=options)(body, words, shared=16)
    np.testing.assert_array_equal(words[:2], np.arange(32) + np.array([[0], [1000]]))
    np.testing.assert_array_equal(words[4:], words[1::-1])


def overlapped(body: str, schedule: Schedule) -> None:
    data = global_array(np.arange(32, dtype=np.uint32))
    Run(schedule=schedule, launches=3, resident=True)(body, data, shared=16)
    np.testing.assert_array_equal(data, np.arange(32) + 3)


def wgmma(body: str, schedule: Schedule) -> None:
    _, d, expected = wgmma_kernel.launch(body, schedule)
    np.testing.assert_array_equal(d, expected)


KERNELS = {
    "budget": (budget, BUDGET),
    "dependent launch": (dependent, DEPENDENT),
    "tensor memory": (tensor, TENSOR),
    "neighbours": (neighbours, NEIGHBOURS),
    "overlapped": (overlapped, OVERLAPPED),
    "cp.async": (copy, COPY),
    "wgmma": (wgmma, wgmma_kernel.KERNEL),
}
