"""Hazards of the tensor core: one correct MMA kernel, and many ways to break it."""

from functools import partial

import numpy as np
import pytest

from tests.emulator import EAGER, STANDARD, Schedule
from tests.emulator.findings import DataRace, EmulatorError
from tests.emulator.machine.launch import Launch
from tests.mutants import FINDING, Mutant, noticed
from tests.test_emulator.assemble import Run, global_array

# K-major without a swizzle: groups of 8 rows 256 bytes apart, halves of a row 128 bytes apart.
_FIXED = 1 << 46 | (256 >> 4) << 32 | (128 >> 4) << 16
# D f32, A and B f16, N = 64, M = 128 (PTX ISA, instruction descriptor of kind::f16).
_INSTRUCTION = 1 << 4 | (64 // 8) << 17 | (128 // 16) << 24

GEMM = f"""
    mov.u32 %r1, smem;
    add.u32 %r2, %r1, 8192;
    add.u32 %r3, %r1, 8200;
    shr.u32 %r4, %r90, 5;
    setp.ne.u32 %p1, %r4, 0;
    setp.ne.u32 %p2, %r90, 0;
    @%p2 bra INIT;
    mbarrier.init.shared.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
INIT:
    @%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 64;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
    mul.wide.u32 %rd1, %r90, 32;
    add.u64 %rd2, %rd90, %rd1;
    ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%rd2];
    ld.global.v4.u32 {{%r14, %r15, %r16, %r17}}, [%rd2+16];
    shr.u32 %r18, %r90, 3;
    and.b32 %r19, %r90, 7;
    shl.b32 %r20, %r18, 8;
    shl.b32 %r21, %r19, 4;
    add.u32 %r22, %r20, %r21;
    add.u32 %r23, %r22, %r1;
    st.shared.v4.u32 [%r23], {{%r10, %r11, %r12, %r13}};
    st.shared.v4.u32 [%r23+128], {{%r14, %r15, %r16, %r17}};
    setp.ge.u32 %p3, %r90, 64;
    @%p3 bra FILLED;
    add.u64 %rd3, %rd91, %rd1;
    ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%rd3];
    ld.global.v4.u32 {{%r14, %r15, %r16, %r17}}, [%rd3+16];
    st.shared.v4.u32 [%r23+4096], {{%r10, %r11, %r12, %r13}};
    st.shared.v4.u32 [%r23+4224], {{%r14, %r15, %r16, %r17}};
FILLED:
    fence.proxy.async.shared::cta;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    ld.shared.u32 %r30, [%r3];
    @%p2 bra ISSUED;
    shr.u32 %r31, %r1, 4;
    cvt.u64.u32 %rd4, %r31;
    or.b64 %rd5, %rd4, {_FIXED};
    add.u64 %rd6, %rd5, 256;
    mov.u32 %r32, {_INSTRUCTION};
    setp.eq.u32 %p4, %r90, 99;
    tcgen05.mma.cta_group::1.kind::f16 [%r30], %rd5, %rd6, %r32, %p4;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];
ISSUED:
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p5, [%r2], 0;
    @!%p5 bra WAIT;
    tcgen05.fence::after_thread_sync;
    shl.b32 %r33, %r4, 21;
    add.u32 %r34, %r30, %r33;
    mul.wide.u32 %rd7, %r90, 256;
    add.u64 %rd8, %rd92, %rd7;
    mov.u32 %r35, 0;
COLUMNS:
    tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%r40, %r41, %r42, %r43}}, [%r34];
    tcgen05.wait::ld.sync.aligned;
    st.global.v4.u32 [%rd8], {{%r40, %r41, %r42, %r43}};
    add.u32 %r34, %r34, 4;
    add.u64 %rd8, %rd8, 16;
    add.u32 %r35, %r35, 1;
    setp.lt.u32 %p6, %r35, 16;
    @%p6 bra COLUMNS;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    @%p1 bra DONE;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 64;
DONE:
"""


def gemm(
    body: str = GEMM, schedule: Schedule = EAGER, strict: bool = True
) -> tuple[Launch, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    a = global_array(rng.integers(-4, 5, (128, 16)), np.float16)
    b = global_array(rng.integers(-4, 5, (64, 16)), np.float16)
    d = global_array(np.full((128, 64), np.nan, np.float32))
    options = {"strict_tensor_fences": strict}
    launch = Run(block=128, schedule=schedule, options=options)(body, a, b, d, shared=9216)
    return launch, d, a.astype(np.float32) @ b.astype(np.float32).T


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_the_kernel_is_right_in_every_schedule(schedule: Schedule) -> None:
    launch, d, expected = gemm(schedule=schedule)
    np.testing.assert_array_equal(d, expected)
    assert not launch.findings


def test_what_the_kernel_did_is_counted() -> None:
    counters = gemm()[0].counters
    assert dict(counters.multiplies) == {("f16", 128, 64, 16, 1): 1}
    assert counters.nbytes["tensor to registers"] == 128 * 64 * 4
    assert counters.nbytes["global write"] == 128 * 64 * 4
    assert counters.nbytes["global read"] == (128 + 64) * 16 * 2
    assert counters.nbytes["HBM read, each byte once"] == (128 + 64) * 16 * 2
    assert counters.nbytes["HBM write, each byte once"] == 128 * 64 * 4
    assert counters.nbytes["shared write"] == (128 + 64) * 16 * 2
    assert counters.instructions[0, "tcgen05.mma"] == 1
    assert counters.instructions[1, "tcgen05.mma"] == 0
    assert [counters.instructions[w, "tcgen05.ld"] for w in range(4)] == [16] * 4
    assert counters.waits["mbarrier"] > 0


def test_a_perfect_l2_serves_what_is_read_again() -> None:
    source = global_array(np.zeros(32, np.uint32))
    once = "mad.wide.u32 %rd1, %r90, 4, %rd90; ld.global.u32 %r1, [%rd1];"
    again = "ld.global.u32 %r2, [%rd1];"
    assert Run()(once, source).counters.l2_hits == 0
    assert Run()(once + again, source).counters.l2_hits == 0.5


COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];"
MMA = "tcgen05.mma.cta_group::1.kind::f16 [%r30], %rd5, %rd6, %r32, %p4;"
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 64;"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r40, %r41, %r42, %r43}, [%r34];"
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 64;"

# Mutants that violate the PTX ISA, but NVIDIA's own kernels contain the same code.
STRICT = "strict"
MUTANTS = {
    "no proxy fence": Mutant.edited(
        "fence.proxy.async.shared::cta;", "", "MissingProxyFence", "tcgen05.mma|fence.proxy.async"
    ),
    "no barrier before the MMA": Mutant.edited(
        "bar.sync 0;\n    tcgen05.fence::after_thread_sync;\n    ld.shared",
        "tcgen05.fence::after_thread_sync;\n    ld.shared",
        FINDING,
        "read of shared memory",
    ),
    "no commit": Mutant.edited(COMMIT, "", "Deadlock", "completion of parity 0"),
    "commit before the MMA": Mutant.edited(
        f"{MMA}\n    {COMMIT}", f"{COMMIT}\n    {MMA}", FINDING, "tensor memory"
    ),
    "accumulator not waited for": Mutant.edited(
        "@!%p5 bra WAIT;", "", FINDING, "tensor memory.*(nothing has written|nothing orders)"
    ),
    "no wait::ld": Mutant.edited(
        "tcgen05.wait::ld.sync.aligned;", "", "UnwaitedLoad", "tcgen05.wait::ld between the two"
    ),
    "wait::ld after the store": Mutant.edited(
        "tcgen05.wait::ld.sync.aligned;\n    st.global.v4.u32 [%rd8], {%r40, %r41, %r42, %r43};",
        "st.global.v4.u32 [%rd8], {%r40, %r41, %r42, %r43};\n    tcgen05.wait::ld.sync.aligned;",
        "UnwaitedLoad",
        "tcgen05.wait::ld between the two",
    ),
    "never freed": Mutant.edited(DEALLOC, "", "TensorMemoryMisuse", "tcgen05.dealloc is missing"),
    "freed twice": Mutant.edited(
        DEALLOC, f"{DEALLOC}\n    {DEALLOC}", "TensorMemoryMisuse", "allocated are none"
    ),
    "freed in part": Mutant.edited(
        DEALLOC, DEALLOC.replace("64", "32"), "TensorMemoryMisuse", "dealloc of 32 columns"
    ),
    "freed too early": Mutant.edited(
        "bar.sync 0;\n    tcgen05.fence::after_thread_sync;\n    @%p1 bra DONE;",
        "@%p1 bra DONE;",
        FINDING,
        "tensor memory|allocated are none",
    ),
    "odd number of columns": Mutant.edited(
        ALLOC, ALLOC.replace("64", "48"), "IllegalInstruction", "48"
    ),
    "more columns than there are": Mutant.edited(
        ALLOC,
        f"{ALLOC}\n    {ALLOC.replace('64', '512')}",
        "Deadlock",
        "waits for 512 free columns",
    ),
    "allocation after giving up the right": Mutant.edited(
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
        f"tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n    {ALLOC}",
        "TensorMemoryMisuse",
        "relinquish",
    ),
    "columns nobody allocated": Mutant.edited(
        "setp.lt.u32 %p6, %r35, 16;",
        "setp.lt.u32 %p6, %r35, 17;",
        "TensorMemoryMisuse",
        r"columns \[64, 68\)",
    ),
    "lanes of another warp": Mutant.edited(
        "shl.b32 %r33, %r4, 21;", "mov.u32 %r33, 0;", "LaneReach", "reaches lanes 32 to 63"
    ),
    "accumulates onto nothing": Mutant.edited(
        "setp.eq.u32 %p4, %r90, 99;",
        "setp.eq.u32 %p4, %r90, 0;",
        "UninitialisedRead",
        "tensor memory of .* at lane 0, column 0, that nothing",
    ),
    "operand beyond shared memory": Mutant.edited(
        "add.u64 %rd6, %rd5, 256;", "add.u64 %rd6, %rd5, 8192;", FINDING, "shared memory"
    ),
    "operand nobody wrote": Mutant.edited(
        "add.u64 %rd6, %rd5, 256;", "add.u64 %rd6, %rd5, 320;", "UninitialisedRead", "shared memory"
    ),
    "descriptor of no version": Mutant.edited(
        f"or.b64 %rd5, %rd4, {_FIXED};",
        f"or.b64 %rd5, %rd4, {_FIXED & ~(1 << 46)};",
        "IllegalInstruction",
        "descriptor",
    ),
    "shape that does not exist": Mutant.edited(
        f"mov.u32 %r32, {_INSTRUCTION};",
        f"mov.u32 %r32, {_INSTRUCTION | 1 << 24};",
        "IllegalInstruction",
        "M = 144",
    ),
    "two kinds of cta_group": Mutant.edited(
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
        "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;",
        "IllegalInstruction",
        "cta_group::2",
    ),
    "no fence before the barrier": Mutant.edited(
        "tcgen05.fence::before_thread_sync;\n    bar.sync 0;\n    tcgen05.fence::after_thread_sync;"
        "\n    @%p1",
        "bar.sync 0;\n    tcgen05.fence::after_thread_sync;\n    @%p1",
        "DataRace",
        "tensor memory",
        STRICT,
    ),
    "no fence after the mbarrier": Mutant.edited(
        "@!%p5 bra WAIT;\n    tcgen05.fence::after_thread_sync;",
        "@!%p5 bra WAIT;",
        "MissingTensorFence",
        "tcgen05.fence::after_thread_sync is missing",
        STRICT,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_reported(name: str) -> None:
    mutant = MUTANTS[name]
    wrong = mutant.change(GEMM)
    reports = [found for s in STANDARD if (found := noticed(partial(gemm, wrong, s)))]
    assert reports, "no schedule reported it"
    assert all(isinstance(report, EmulatorError) for report in reports)
    mutant.check(reports[0])
    if mutant.on == STRICT:
        gemm(wrong, strict=False)


# The same kernel with relaxed waits and arrivals, which tcgen05.commit and the fences complement
# (PTX ISA, tcgen05 memory consistency, canonical patterns).
_LAST = "bar.sync 0;\n    tcgen05.fence::after_thread_sync;\n    @%p1 bra DONE;"
RELAXED = (
    GEMM.replace("try_wait.parity.shared", "try_wait.parity.relaxed.cta.shared::cta")
    .replace("add.u32 %r3, %r1, 8200;", "add.u32 %r3, %r1, 8200; add.u32 %r50, %r1, 8208;")
    .replace("[%r2], 1;", "[%r2], 1; mbarrier.init.shared.b64 [%r50], 128;")
    .replace(
        _LAST,
        """mbarrier.arrive.relaxed.cta.shared.b64 _, [%r50];
    @%p1 bra DONE;
FREE:
    mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p7, [%r50], 0;
    @!%p7 bra FREE;
    tcgen05.fence::after_thread_sync;""",
    )
)


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_fences_make_up_for_relaxed_barriers(schedule: Schedule) -> None:
    launch, d, expected = gemm(RELAXED, schedule)
    np.testing.assert_array_equal(d, expected)
    assert not launch.findings


@pytest.mark.parametrize(
    "needed",
    [
        "@!%p5 bra WAIT;\n    tcgen05.fence::after_thread_sync;",
        "tcgen05.fence::before_thread_sync;\n    mbarrier.arrive.relaxed",
        "@!%p7 bra FREE;\n    tcgen05.fence::after_thread_sync;",
    ],
)
def test_relaxed_barriers_order_nothing_by_themselves(needed: str) -> None:
    assert RELAXED.count(needed) == 1
    fences = ("tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;")
    wrong = RELAXED.replace(needed, needed.replace(fences[0], "").replace(fences[1], ""))
    with pytest.raises(DataRace, match="tensor memory"):
        gemm(wrong, strict=False)
