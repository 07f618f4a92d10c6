"""Hand-written wgmma kernel: D = A · Bᵀ with A in registers and B in shared memory.

One warpgroup, M = 64, N = 16, K = 64 as four wgmma of 16. B is rows of 128 bytes with 128-byte
swizzle, stored by the threads themselves.
"""

import numpy as np

from tests.emulator import EAGER, Schedule
from tests.emulator.machine.launch import Launch
from tests.test_emulator.assemble import Run, global_array

N, K = 16, 64
_DESCRIPTOR = 1 << 62 | (1024 >> 4) << 32 | 1 << 16
D = ", ".join(f"%f{i}" for i in range(8))


def multiply(step: int) -> str:
    """PTX of the wgmma over 16 elements of K."""
    a = ", ".join(f"%r{40 + 4 * step + i}" for i in range(4))
    return (
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        f"{{{D}}}, {{{a}}}, %rd{20 + step}, 1, 1, 1, 0;"
    )


# Thread t stores 16 bytes of B: row t / 8, piece t % 8, which the swizzle moves to t % 8 ^ row % 8.
FILL = """
    mov.u32 %r1, smem;
    shr.u32 %r2, %r90, 3;
    and.b32 %r3, %r90, 7;
    and.b32 %r4, %r2, 7;
    xor.b32 %r4, %r4, %r3;
    shl.b32 %r5, %r2, 7;
    shl.b32 %r6, %r4, 4;
    add.u32 %r5, %r5, %r6;
    add.u32 %r5, %r5, %r1;
    mul.wide.u32 %rd1, %r90, 16;
    add.u64 %rd1, %rd1, %rd91;
    ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd1];
    st.shared.v4.u32 [%r5], {%r10, %r11, %r12, %r13};
    fence.proxy.async.shared::cta;
    bar.sync 0;
"""

# Lane t of warp w loads rows 16 w + t / 4 and 8 further on, columns 2 (t % 4) and 8 further on.
_ROW = """
    shr.u32 %r20, %r90, 5;
    and.b32 %r21, %r90, 31;
    shr.u32 %r22, %r21, 2;
    and.b32 %r23, %r21, 3;
    shl.b32 %r24, %r20, 4;
    add.u32 %r24, %r24, %r22;
"""
LOAD = (
    _ROW
    + """
    shl.b32 %r25, %r24, 7;
    shl.b32 %r26, %r23, 2;
    add.u32 %r25, %r25, %r26;
    cvt.u64.u32 %rd2, %r25;
    add.u64 %rd2, %rd2, %rd90;
"""
    + "".join(
        f"    ld.global.u32 %r{40 + 4 * step + 2 * half + low}, "
        f"[%rd2+{32 * step + 16 * half + 1024 * low}];\n"
        for step in range(4)
        for half in range(2)
        for low in range(2)
    )
)

ZERO = "".join(f"    mov.f32 %f{i}, 0f00000000;\n" for i in range(8))
DESCRIPTORS = (
    "    shr.u32 %r7, %r1, 4;\n    cvt.u64.u32 %rd19, %r7;\n"
    f"    or.b64 %rd20, %rd19, {_DESCRIPTOR};\n"
    + "".join(f"    add.u64 %rd{20 + step}, %rd20, {2 * step};\n" for step in range(1, 4))
)
FENCE = "wgmma.fence.sync.aligned;"
COMMIT = "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
MULTIPLIES = "".join(f"    {multiply(step)}\n" for step in range(4))
STORE = """
    shl.b32 %r27, %r24, 6;
    shl.b32 %r28, %r23, 3;
    add.u32 %r27, %r27, %r28;
    cvt.u64.u32 %rd3, %r27;
    add.u64 %rd3, %rd3, %rd92;
    st.global.v2.f32 [%rd3], {%f0, %f1};
    st.global.v2.f32 [%rd3+512], {%f2, %f3};
    st.global.v2.f32 [%rd3+32], {%f4, %f5};
    st.global.v2.f32 [%rd3+544], {%f6, %f7};
"""
KERNEL = (
    f"{FILL}{LOAD}{ZERO}{DESCRIPTORS}\n    {FENCE}\n{MULTIPLIES}    {COMMIT}\n    {WAIT}\n{STORE}"
)


def launch(
    body: str = KERNEL, schedule: Schedule = EAGER, block: int = 128, target: str = "sm_90a"
) -> tuple[Launch, np.ndarray, np.ndarray]:
    """Run the kernel; return the launch, D, and the expected D."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    a = global_array(rng.integers(-4, 5, (64, K)), ml_dtypes.bfloat16)
    b = global_array(rng.integers(-4, 5, (N, K)), ml_dtypes.bfloat16)
    d = global_array(np.full((64, N), np.nan, np.float32))
    run = Run(block=block, schedule=schedule, target=target)
    done = run(body, a.view(np.uint16), b.view(np.uint16), d, shared=2048)
    return done, d, a.astype(np.float32) @ b.astype(np.float32).T
