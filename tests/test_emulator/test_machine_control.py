"""Branches, divergence, special registers, launches."""

import ctypes
import mmap
from dataclasses import replace

import numpy as np
import pytest

from tests.emulator import STANDARD, Gpu, Schedule
from tests.emulator.findings import (
    CooperativeLaunchTooLarge,
    Deadlock,
    DivergentExecution,
    KernelAssertion,
    LaunchError,
    Livelock,
    OutOfBounds,
    PtxSyntaxError,
    UninitialisedRead,
    UnknownInstruction,
)
from tests.emulator.machine.limits import B200
from tests.test_emulator.assemble import Run, assemble, global_array, run

STORE = """
    mad.wide.u32 %rd1, %r90, 4, %rd90;
    st.global.u32 [%rd1], %r1;
"""


def result(body: str, threads: int = 32, **options: int) -> list[int]:
    out = global_array(np.zeros(threads, np.uint32))
    Run(block=threads, **options)(body + STORE, out)
    return out.tolist()


def test_lanes_that_part_meet_again() -> None:
    body = """
        mov.u32 %r1, 0;
        setp.lt.u32 %p1, %r90, 10;
        @%p1 bra LOW;
        add.u32 %r1, %r1, 100;
        bra MEET;
    LOW:
        add.u32 %r1, %r1, 1;
        setp.lt.u32 %p2, %r90, 5;
        @!%p2 bra MEET;
        add.u32 %r1, %r1, 10;
    MEET:
        add.u32 %r1, %r1, 1000;
    """
    expected = [1011 if t < 5 else 1001 if t < 10 else 1100 for t in range(32)]
    assert result(body) == expected


def test_lanes_leave_a_loop_one_by_one() -> None:
    body = """
        mov.u32 %r1, 0;
        mov.u32 %r2, 0;
    LOOP:
        add.u32 %r1, %r1, %r2;
        add.u32 %r2, %r2, 1;
        setp.le.u32 %p1, %r2, %r90;
        @%p1 bra LOOP;
        shl.b32 %r3, %r2, 16;
        or.b32 %r1, %r1, %r3;
    """
    assert result(body) == [sum(range(t + 1)) | (t + 1) << 16 for t in range(32)]


def test_a_value_of_the_last_iteration_is_each_lanes_own() -> None:
    """Each lane keeps its own last value of %r4, written per iteration, read after the loop."""
    body = """
        mov.u32 %r2, 0;
    LOOP:
        mul.lo.u32 %r4, %r2, 7;
        add.u32 %r2, %r2, 1;
        setp.le.u32 %p1, %r2, %r90;
        @%p1 bra LOOP;
        mov.u32 %r1, %r4;
    """
    assert result(body) == [7 * t for t in range(32)]


def test_lanes_that_exit_stay_away() -> None:
    body = """
        mov.u32 %r1, 7;
        setp.gt.u32 %p1, %r90, 20;
        @%p1 exit;
        activemask.b32 %r1;
    """
    assert result(body) == [2**21 - 1 if t <= 20 else 0 for t in range(32)]


def test_a_guard_keeps_what_its_lanes_had() -> None:
    body = """
        mov.u32 %r1, 5;
        setp.eq.u32 %p1, %r90, 3;
        @%p1 mov.u32 %r1, 9;
        setp.eq.u32 %p2, %r90, 4;
        @!%p2 add.u32 %r1, %r1, 1;
    """
    assert result(body) == [10 if t == 3 else 5 if t == 4 else 6 for t in range(32)]


def test_a_partial_warp_has_no_more_lanes() -> None:
    assert result("activemask.b32 %r1;", threads=40) == [2**32 - 1] * 32 + [255] * 8


def test_warp_index_without_a_shuffle_is_uniform() -> None:
    body = """
        shr.u32 %r2, %r90, 5;
        setp.eq.u32 %p1, %r2, 1;
        mov.u32 %r1, 0;
        @!%p1 bra DONE;
        mov.u32 %r1, 1;
    DONE:
    """
    assert result(body, threads=64) == [0] * 32 + [1] * 32


def test_special_registers() -> None:
    out = global_array(np.zeros((8, 8), np.uint32))
    body = """
        setp.ne.u32 %p1, %r90, 0;
        @%p1 exit;
        mov.u32 %r2, %ctaid.x;
        mad.wide.u32 %rd1, %r2, 32, %rd90;
        mov.u32 %r3, %cluster_ctarank;
        mov.u32 %r4, %cluster_nctarank;
        mov.u32 %r5, %clusterid.x;
        mov.u32 %r6, %nctaid.x;
        mov.u32 %r7, %ntid.x;
        mov.u32 %r8, %nclusterid.x;
        st.global.v4.u32 [%rd1], {%r2, %r3, %r4, %r5};
        st.global.v2.u32 [%rd1+16], {%r6, %r7};
        st.global.u32 [%rd1+24], %r8;
    """
    Run(grid=8, cluster=2)(body, out)
    assert out.tolist() == [[c, c % 2, 2, c // 2, 8, 32, 4, 0] for c in range(8)]


def test_trap_is_a_named_error_with_its_place() -> None:
    with pytest.raises(KernelAssertion, match=r"CTA \(0, 0, 0\) warp 0, PTX line \d+: trap"):
        run("trap;")


def test_polling_for_ever_is_reported() -> None:
    flag = global_array(np.zeros(1, np.uint32))
    body = """
    LOOP:
        ld.acquire.gpu.global.u32 %r1, [%rd90];
        setp.eq.u32 %p1, %r1, 0;
        @%p1 bra LOOP;
    """
    with pytest.raises(Deadlock, match=r"a write to 0x[0-9a-f]+, which it has polled"):
        run(body, flag)
    atomic = body.replace("ld.acquire.gpu.global.u32 %r1, [%rd90]", "atom.or.b32 %r1, [%rd90], 0")
    with pytest.raises(Livelock, match="only polled"):
        run(atomic, flag)


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_a_cta_may_poll_for_one_that_starts_later(schedule: Schedule) -> None:
    flag = global_array(np.zeros(1, np.uint32))
    body = """
        mov.u32 %r1, %ctaid.x;
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra SET;
    LOOP:
        ld.acquire.gpu.global.u32 %r2, [%rd90];
        setp.ne.u32 %p2, %r2, 3;
        @%p2 bra LOOP;
        bra DONE;
    SET:
        setp.eq.u32 %p3, %r90, 0;
        @%p3 red.release.gpu.global.add.u32 [%rd90], 1;
    DONE:
    """
    Run(grid=4, schedule=schedule)(body, flag)
    assert flag[0] == 3


def test_a_cooperative_launch_has_to_fit() -> None:
    gpu = Gpu(replace(B200, sms=1))
    module = gpu.load(assemble("", 0))
    gpu.launch(module, "k", (32, 1, 1), (32, 1, 1), attributes={"cooperative": 1})
    with pytest.raises(CooperativeLaunchTooLarge, match=r"33 CTAs .* holds 32 at once"):
        gpu.launch(module, "k", (33, 1, 1), (32, 1, 1), attributes={"cooperative": 1})
    gpu.launch(module, "k", (33, 1, 1), (32, 1, 1))


def test_an_aligned_instruction_in_divergent_code() -> None:
    body = """
        setp.lt.u32 %p1, %r90, 4;
        @!%p1 bra DONE;
        bar.sync 0;
    DONE:
    """
    with pytest.raises(DivergentExecution, match=r"without lanes \[4, 5"):
        run(body)


@pytest.mark.parametrize(
    ("body", "error", "match"),
    [
        ("frobnicate.u32 %r1, %r2;", UnknownInstruction, r"frobnicate.u32 is not modelled"),
        ("add.frob.u32 %r1, %r90, 1;", UnknownInstruction, "frob"),
        ("ld.global.frob.u32 %r1, [%rd90];", UnknownInstruction, r"modifier .frob"),
        ("mov.u32 %r1, %nosuch;", UnknownInstruction, "%nosuch"),
        ("bra NOWHERE;", PtxSyntaxError, "NOWHERE is not defined"),
        ("add.u32 %r1, %r2 %r3;", PtxSyntaxError, "expected ',' or ';'"),
        ("mov.u32 %r1, ^;", PtxSyntaxError, "cannot read"),
    ],
)
def test_what_is_not_understood_is_named(body: str, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        run(body, global_array(np.zeros(32, np.uint32)))


def launch(**changes: object) -> None:
    gpu = Gpu()
    text = assemble("mov.u32 %r1, 0;", 0)
    directive = str(changes.pop("directive", ""))
    module = gpu.load(text.replace("k()\n", f"k()\n{directive}\n"))
    arguments: dict[str, object] = {"kernel": "k", "grid": (1, 1, 1), "block": (32, 1, 1)}
    gpu.launch(module, **{**arguments, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"kernel": "j"}, r"kernel: 'j', the module has \['k'\]"),
        ({"grid": (0, 1, 1)}, "grid: .* at least 1"),
        ({"grid": (1, 65536, 1)}, r"grid: \(1, 65536, 1\), the limit of y and z is 65535"),
        ({"grid": (1, 1, 65536)}, "the limit of y and z is 65535"),
        ({"block": (1056, 1, 1)}, "block: 1056 threads, the limit is 1024"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "not a multiple of the cluster"),
        ({"grid": (32, 1, 1), "cluster": (32, 1, 1)}, "cluster: 32 CTAs, the limit is 16"),
        ({"dynamic_shared": 232449}, "shared memory: 232449 bytes"),
        ({"parameters": [b"1234"]}, "parameters: 1 given, k declares 0"),
        ({"directive": ".reqntid 64, 1, 1"}, r"compiled for .reqntid \(64, 1, 1\)"),
        (
            {"directive": ".maxnreg 255", "block": (512, 1, 1)},
            "registers: .maxnreg 255 for 16 warps are more than the 65536",
        ),
        ({"directive": ".maxntid 16, 1, 1"}, "compiled for .maxntid 16"),
        ({"directive": ".reqnctapercluster 2"}, "compiled for clusters of"),
    ],
)
def test_a_launch_the_device_would_refuse(changes: dict[str, object], match: str) -> None:
    with pytest.raises(LaunchError, match=match):
        launch(**changes)


def test_the_largest_launch_is_fine() -> None:
    launch(dynamic_shared=232448, block=(1024, 1, 1))


def test_out_of_bounds_names_the_nearest_allocation() -> None:
    out = global_array(np.zeros(32, np.uint32))
    with pytest.raises(OutOfBounds, match=r"write at 0x.*: no allocation .*array 0"):
        run("mov.u32 %r1, 0;" + STORE.replace("%r90, 4", "%r90, 8"), out)


def test_global_memory_below_4_gib() -> None:
    """Global memory may have addresses that shared memory also has, as some heaps do."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    below_2_gib = 0x40  # MAP_32BIT of x86-64
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | below_2_gib
    page = libc.mmap(None, ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if page in (None, ctypes.c_void_p(-1).value) or page >= 1 << 32:
        pytest.skip("no memory below 4 GiB on this system")
    data = np.ctypeslib.as_array((ctypes.c_uint32 * 32).from_address(page))
    run("mov.u32 %r1, %tid.x;" + STORE, data)
    assert data.tolist() == list(range(32))
    with pytest.raises(OutOfBounds, match=r"write at 0x.*: no allocation .*array 0"):
        run("mov.u32 %r1, 0;" + STORE.replace("%r90, 4", "%r90, 8"), data)


def test_a_register_nothing_has_written() -> None:
    body = """
        mov.u32 %r2, %ctaid.x;
        setp.eq.u32 %p1, %r2, 9;
        @!%p1 bra SKIP;
        mov.u32 %r1, 1;
    SKIP:
    """
    with pytest.raises(UninitialisedRead, match="register %r1 that nothing has written"):
        run(body + STORE, global_array(np.zeros(32, np.uint32)))
