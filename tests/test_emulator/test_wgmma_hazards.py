"""Hazards of wgmma: one correct kernel, and many ways to break it."""

import numpy as np
import pytest

from tests.emulator import STANDARD, Schedule
from tests.emulator.findings import (
    DivergentExecution,
    EmulatorError,
    IllegalInstruction,
    UnwaitedMma,
)
from tests.mutants import FINDING, Mutant, noticed
from tests.test_emulator.wgmma_kernel import (
    COMMIT,
    DESCRIPTORS,
    FENCE,
    FILL,
    KERNEL,
    LOAD,
    MULTIPLIES,
    STORE,
    WAIT,
    ZERO,
    launch,
    multiply,
)


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_the_kernel_is_right_in_every_schedule(schedule: Schedule) -> None:
    done, d, expected = launch(schedule=schedule)
    np.testing.assert_array_equal(d, expected)
    assert dict(done.counters.multiplies) == {("wgmma bf16", 64, 16, 16, 1): 4}
    assert done.counters.instructions[3, "wgmma.mma_async"] == 4


FIRST, LAST = multiply(0), multiply(3)
# Warp 0 alone; the other three warps jump over it.
ONE_WARP = "setp.ne.u32 %p1, %r20, 0;\n    @%p1 bra OVER;\n    {}\nOVER:"

MUTANTS = {
    "no wait": Mutant.edited(WAIT, "", "UnwaitedMma", "read of %f0, an accumulator .* in flight"),
    "wait for all but the last group": Mutant.edited(
        WAIT, WAIT.replace(" 0;", " 1;"), "UnwaitedMma", "wgmma.wait_group between"
    ),
    "no commit": Mutant.edited(
        COMMIT, "", "UnwaitedMma", "wgmma.commit_group and wgmma.wait_group"
    ),
    "commit before the last multiply": Mutant.edited(
        f"{LAST}\n    {COMMIT}", f"{COMMIT}\n    {LAST}", "UnwaitedMma", "wgmma.commit_group and"
    ),
    "no wait and nobody reads": Mutant.edited(
        WAIT + "\n" + STORE, "", "UnwaitedMma", "exits with a wgmma"
    ),
    "accumulator read in flight": Mutant.edited(
        COMMIT, f"mov.f32 %f20, %f3;\n    {COMMIT}", "UnwaitedMma", "read of %f3, an accumulator"
    ),
    "accumulator written in flight": Mutant.edited(
        WAIT, f"mov.f32 %f3, 0f00000000;\n    {WAIT}", "UnwaitedMma", "write of %f3, an accumulator"
    ),
    "A written in flight": Mutant.edited(
        WAIT, f"mov.u32 %r43, 0;\n    {WAIT}", "UnwaitedMma", "write of %r43, A of the wgmma"
    ),
    "accumulator of another shape in flight": Mutant.edited(
        LAST,
        LAST.replace("n16k16", "n8k16").replace(", %f4, %f5, %f6, %f7", ""),
        "UnwaitedMma",
        "use of %f0, an accumulator",
    ),
    "A is an accumulator in flight": Mutant.edited(
        LAST, LAST.replace("%r52", "%f0"), "UnwaitedMma", "use of %f0, an accumulator"
    ),
    "no wgmma.fence": Mutant.edited(FENCE, "", "MissingRegisterFence", "before the first wgmma"),
    "accumulator cleared after the fence": Mutant.edited(
        FENCE,
        f"{FENCE}\n    mov.f32 %f5, 0f00000000;",
        "MissingRegisterFence",
        "after PTX line .* mov.f32 %f5",
    ),
    "A changed after the fence": Mutant.edited(
        multiply(2),
        f"shl.b32 %r48, %r48, 0;\n    {multiply(2)}",
        "MissingRegisterFence",
        "after PTX line .* shl.b32 %r48",
    ),
    "second round without a fence": Mutant.edited(
        WAIT,
        f"{WAIT}\n    mul.f32 %f1, %f1, %f1;\n    {FIRST}\n    {COMMIT}\n    {WAIT}",
        "MissingRegisterFence",
        "mul.f32 %f1",
    ),
    "no proxy fence": Mutant.edited(
        "fence.proxy.async.shared::cta;", "", "MissingProxyFence", "wgmma read of B|proxy.async"
    ),
    "no barrier": Mutant.edited("bar.sync 0;", "", FINDING, "shared memory"),
    "B overwritten in flight": Mutant.edited(
        COMMIT,
        f"{COMMIT}\n    setp.eq.u32 %p1, %r90, 40;\n    @%p1 st.shared.u32 [%r1], %r20;",
        "DataRace",
        "(?s)shared memory.*wgmma.mma_async",
    ),
    "one warp only": Mutant.edited(
        LAST, ONE_WARP.format(LAST), "DivergentExecution", "must execute the same one"
    ),
    "one warp more": Mutant.edited(
        WAIT,
        f"{WAIT}\n    {ONE_WARP.format(FIRST + COMMIT + WAIT)}",
        "DivergentExecution",
        r"warps \[[123]\] exit without|must execute",
    ),
    "some lanes only": Mutant.edited(
        LAST, f"setp.gt.u32 %p1, %r21, 7;\n    @%p1 {LAST}", "DivergentExecution", "without lanes"
    ),
    "descriptors of two warps differ": Mutant.edited(
        FIRST,
        f"cvt.u64.u32 %rd40, %r20;\n    mad.lo.u64 %rd20, %rd40, 2, %rd20;\n    {FIRST}",
        "DivergentExecution",
        "another descriptor or scale-d",
    ),
    "descriptors of two lanes differ": Mutant.edited(
        LAST,
        f"cvt.u64.u32 %rd40, %r21;\n    add.u64 %rd23, %rd23, %rd40;\n    {LAST}",
        "IllegalInstruction",
        "B's descriptor of a wgmma differs between lanes",
    ),
    "starts in the middle of a pattern": Mutant.edited(
        "add.u64 %rd21, %rd20, 2;", "add.u64 %rd21, %rd20, 8;", "Misaligned", "first row"
    ),
    "descriptor of tcgen05": Mutant.edited(
        FENCE,
        f"or.b64 %rd20, %rd20, {1 << 46};\n    {FENCE}",
        "IllegalInstruction",
        "it is a descriptor of tcgen05",
    ),
    "base offset": Mutant.edited(
        FENCE, f"or.b64 %rd20, %rd20, {1 << 49};\n    {FENCE}", "UnknownInstruction", "base offset"
    ),
    "beyond shared memory": Mutant.edited(
        "add.u64 %rd21, %rd20, 2;", "add.u64 %rd21, %rd20, 64;", "ArrayOverrun", "shared memory"
    ),
    "B not written": Mutant.edited(
        "st.shared.v4.u32", "@%p9 st.shared.v4.u32", "UninitialisedRead", "nothing has written"
    ),
    "accumulator not written": Mutant.edited(
        "    mov.f32 %f6, 0f00000000;\n", "", "UninitialisedRead", "nothing has written"
    ),
    "A not written": Mutant.edited(
        "ld.global.u32 %r44", "@%p9 ld.global.u32 %r44", "UninitialisedRead", "%r44"
    ),
    "N of 12": Mutant.edited(
        LAST, LAST.replace("n16k16", "n12k16"), "IllegalInstruction", "multiples of 8 up to 256"
    ),
    "too few accumulators": Mutant.edited(
        LAST,
        LAST.replace("n16k16", "n24k16"),
        "IllegalInstruction",
        "8 registers for D, accepted 12",
    ),
    "E5M2": Mutant.edited(
        LAST, LAST.replace("k16.f32.bf16.bf16", "k32.f32.e5m2.e5m2"), "UnknownInstruction", "only"
    ),
    "E4M3 with imm-trans-b": Mutant.edited(
        LAST,
        LAST.replace("k16.f32.bf16.bf16", "k32.f32.e4m3.e4m3"),
        "IllegalInstruction",
        "with 7 operands; accepted are D, A, B's descriptor",
    ),
    "scale-a of 2": Mutant.edited(
        LAST, LAST.replace("1, 1, 1, 0", "1, 2, 1, 0"), "IllegalInstruction", "imm-scale-a is 2"
    ),
}


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_reported_in_every_schedule(mutant: Mutant, schedule: Schedule) -> None:
    # A predicate that is never true.
    body = "setp.ne.u32 %p9, %r90, %r90;\n" + mutant.change(KERNEL)
    found = noticed(lambda: launch(body, schedule))
    mutant.check(found)
    assert isinstance(found, EmulatorError)
    assert found.where is not None


def test_two_chains_in_flight() -> None:
    """A wait for all but one group releases the first chain's registers only."""
    second = MULTIPLIES.replace("%f", "%f1")
    zeros = ZERO.replace("%f", "%f1")
    wait = WAIT.replace(" 0;", " 1;")
    double = "".join(f"    add.f32 %f{i}, %f{i}, %f{i + 10};\n" for i in range(8))
    body = f"{FILL}{LOAD}{ZERO}{zeros}{DESCRIPTORS}{FENCE}{MULTIPLIES}{COMMIT}{second}{COMMIT}"
    for schedule in STANDARD:
        _, d, expected = launch(f"{body}{WAIT}{double}{STORE}", schedule)
        np.testing.assert_array_equal(d, 2 * expected)
        _, d, expected = launch(f"{body}{wait}{STORE}{WAIT}", schedule)
        np.testing.assert_array_equal(d, expected)
        with pytest.raises(UnwaitedMma, match="read of %f10"):
            launch(f"{body}{wait}{double}{STORE}{WAIT}", schedule)


def test_a_third_of_a_warpgroup() -> None:
    with pytest.raises(DivergentExecution, match="CTA of 96 threads"):
        launch(KERNEL.replace("bar.sync 0;", ""), block=96)


@pytest.mark.parametrize("target", ["sm_90", "sm_100a"])
def test_another_target(target: str) -> None:
    with pytest.raises(IllegalInstruction, match=rf"needs \.target sm_90a, .* is {target}"):
        launch(target=target)


@pytest.mark.parametrize(
    "instruction",
    [
        "tcgen05.fence::before_thread_sync;",
        "add.f32x2 %rd1, %rd1, %rd1;",
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %q1;",
    ],
)
def test_instructions_of_blackwell(instruction: str) -> None:
    with pytest.raises(IllegalInstruction, match=r"needs \.target sm_100a, the module's is sm_90a"):
        launch(KERNEL.replace(FENCE, f"{instruction}\n{FENCE}"))
