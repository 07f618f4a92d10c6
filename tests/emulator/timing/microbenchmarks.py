"""Small kernels whose time is known, by hand or from published measurements of the same loop."""

import struct
from dataclasses import dataclass

import numpy as np

from tests.emulator.findings import EmulatorError
from tests.emulator.machine.gpu import Gpu
from tests.emulator.machine.launch import Launch

_HEAD = """.version 8.7
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(.param .u64 data) .reqntid {threads}
{{
.reg .pred %p<8>;
.reg .b32 %r<64>;
.reg .f32 %f<64>;
.reg .b64 %rd<16>;
"""
_SHARED = 160 * 1024


@dataclass(frozen=True)
class Microbenchmark:
    """Kernel with the configuration of its launch.

    Attributes:
        body: PTX between the declarations and ``ret``.
        threads: number of threads of a CTA.
        ctas: number of CTAs of the grid.
        shared: bytes of dynamic shared memory.
        data: bytes of global memory that the only parameter points to.
        cluster: number of CTAs of a cluster.
        dependent: whether the launch may start before its predecessor has ended.
        target: target of the PTX.
    """

    body: str
    threads: int = 32
    ctas: int = 1
    shared: int = 0
    data: int = 4096
    cluster: int = 1
    dependent: bool = False
    target: str = "sm_100a"

    def run(self, gpu: Gpu | None = None) -> Launch:
        """Run the kernel with a trace.

        Findings are ignored: the memory holds no meaningful data.
        """
        gpu = gpu or Gpu(tolerated=(EmulatorError,))
        data = np.zeros(self.data + 256, np.uint8)
        data = data[-data.ctypes.data % 256 :][: self.data]
        gpu.memory.register_array(data)
        text = _HEAD.format(threads=self.threads, target=self.target) + self.body + "\nret;\n}\n"
        address = struct.pack("<Q", data.ctypes.data)
        return gpu.launch(
            gpu.load(text),
            "kernel",
            (self.ctas, 1, 1),
            (self.threads, 1, 1),
            (self.cluster, 1, 1),
            dynamic_shared=self.shared,
            parameters=[address],
            attributes={"programmatic_stream_serialization": int(self.dependent)},
            traced=True,
        )


def chain(instruction: str, count: int, threads: int = 32) -> Microbenchmark:
    """Chain of ``count`` copies of an instruction that depends on itself, in every warp."""
    setup = "mov.b32 %f1, 0f3F800000; mov.b32 %f2, 0f3F800000; mov.b32 %r1, 1; mov.b32 %r2, 3;\n"
    return Microbenchmark(setup + (instruction + "\n") * count, threads)


_BARRIER = """
mov.u32 %r40, dynamic;
mov.u32 %r1, %tid.x;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY;
{init}
READY:
bar.sync 0;
"""
_WAIT = """
{label}:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r10], {parity};
@!%p2 bra {label};
"""


def multiply_loop(
    kind: str, m: int, n: int, count: int, batches: int = 1, from_tensor: bool = False
) -> Microbenchmark:
    """Loop of ``batches`` commits of ``count`` MMAs of one CTA each, with a wait for each commit.

    Args:
        kind: "f16" or "f8f6f4".
        m: number of rows of A.
        n: number of columns of B.
        count: number of MMAs before each commit.
        batches: number of commits.
        from_tensor: whether A is in tensor memory.
    """
    # Descriptors without swizzle: rows of 16 bytes, 8 to a core matrix; version 1.
    layout = (1 << 46) | (8 << 16) | (16 << 32)
    instruction = (1 << 4) | (n // 8 << 17) | (m // 16 << 24)
    a = "[%r31]" if from_tensor else "%rd1"
    multiply = f"tcgen05.mma.cta_group::1.kind::{kind} [%r30], {a}, %rd2, %r32, %p3;\n"
    body = [
        _BARRIER.format(init="mbarrier.init.shared::cta.b64 [%r40], 1;"),
        "add.u32 %r41, %r40, 8;\n",
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r41], 512;\n",
        "ld.shared.b32 %r30, [%r41];\nadd.u32 %r31, %r30, 256;\n",
        f"mov.u32 %r32, {instruction:#x};\nmov.u32 %r10, dynamic;\nsetp.eq.u32 %p3, %r32, %r32;\n",
        f"mov.b64 %rd1, {layout | 64:#x};\nmov.b64 %rd2, {layout | 1024:#x};\n",
        "elect.sync _|%p4, -1;\n",
    ]
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%rd3];\n"
    body.append("cvt.u64.u32 %rd3, %r40;\n")
    for batch in range(batches):
        body.append(f"@!%p4 bra ISSUED{batch};\n{multiply * count}{commit}ISSUED{batch}:\n")
        body.append(_WAIT.format(label=f"DONE{batch}", parity=batch % 2))
    body.append("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 512;\n")
    return Microbenchmark("".join(body), shared=_SHARED)


def warpgroup_loop(n: int, count: int, threads: int = 128, pending: int = 0) -> Microbenchmark:
    """Loop of ``count`` wgmma of N = ``n``, A in registers, one per group, then a partial wait.

    Args:
        n: number of columns, at most 128.
        count: number of wgmma.
        threads: number of threads of a CTA, a multiple of a warpgroup's 128.
        pending: number of groups that may still be in flight after the wait.
    """
    sums = ", ".join(f"%f{number}" for number in range(n // 2))
    layout = (8 << 16) | (16 << 32)  # without swizzle
    multiply = (
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{sums}}}, "
        "{%r2, %r3, %r4, %r5}, %rd2, 1, 1, 1, 0;\nwgmma.commit_group.sync.aligned;\n"
    )
    body = [
        "mov.u32 %r40, dynamic;\n",
        f"mov.b64 %rd2, {layout | 64:#x};\n",
        "".join(f"mov.b32 %r{number}, 0;\n" for number in range(2, 6)),
        "".join(f"mov.f32 %f{number}, 0f00000000;\n" for number in range(n // 2)),
        "wgmma.fence.sync.aligned;\n",
        multiply * count,
        f"wgmma.wait_group.sync.aligned {pending};\n",
    ]
    return Microbenchmark("".join(body), threads, shared=_SHARED, target="sm_90a")


def copy_loop(nbytes: int, stages: int, count: int, ctas: int = 1) -> Microbenchmark:
    """Loop of ``count`` bulk copies of ``nbytes`` from global memory, ``stages`` in flight."""
    init = "".join(f"mbarrier.init.shared::cta.b64 [%r40+{8 * s}], 1;\n" for s in range(stages))
    load = (
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r40+{barrier}], {nbytes};\n"
        "add.u32 %r11, %r40, {place};\n"
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r11], [%rd1], {nbytes}, "
        "[%r40+{barrier}];\n"
    )
    body = [
        _BARRIER.format(init=init),
        "ld.param.u64 %rd1, [data];\n@%p1 bra END;\n",
    ]
    for number in range(count + stages):
        stage = number % stages
        if number >= stages:
            body.append(f"add.u32 %r10, %r40, {8 * stage};")
            body.append(_WAIT.format(label=f"L{number}", parity=(number // stages - 1) % 2))
        if number < count:
            place = 1024 + stage * nbytes
            body.append(load.format(barrier=8 * stage, nbytes=nbytes, place=place))
    body.append("END:")
    return Microbenchmark("".join(body), 32, ctas, _SHARED + 64 * 1024, nbytes)


def store_loop(nbytes: int, count: int) -> Microbenchmark:
    """Loop of ``count`` bulk stores of ``nbytes``, each with a wait for the read of its source."""
    store = (
        f"cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r40], {nbytes};\n"
        "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;\n"
    )
    body = "mov.u32 %r40, dynamic;\nmov.u32 %r1, %tid.x;\nsetp.ne.u32 %p1, %r1, 0;\n"
    body += f"ld.param.u64 %rd1, [data];\n@%p1 bra END;\n{store * count}END:"
    return Microbenchmark(body, shared=_SHARED, data=nbytes)


def tensor_reads(registers: int, count: int) -> Microbenchmark:
    """Four warps that each run ``count`` tcgen05.ld of ``registers`` registers, then wait."""
    names = ", ".join(f"%r{n}" for n in range(2, 2 + registers))
    read = f"tcgen05.ld.sync.aligned.32x32b.x{registers}.b32 {{{names}}}, [%r45];\n"
    body = [
        "mov.u32 %r40, dynamic;\nmov.u32 %r1, %tid.x;\nsetp.ge.u32 %p1, %r1, 32;\n@%p1 bra ALL;\n",
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r40], 512;\nALL:\nbar.sync 0;\n",
        "ld.shared.b32 %r44, [%r40];\nshr.u32 %r46, %r1, 5;\nshl.b32 %r46, %r46, 21;\n",
        "add.u32 %r45, %r44, %r46;\n",
        read * count,
        "tcgen05.wait::ld.sync.aligned;\nbar.sync 0;\n@%p1 bra END;\n",
        "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r44, 512;\nEND:",
    ]
    return Microbenchmark("".join(body), 128, shared=_SHARED)


def late_warp(count: int) -> Microbenchmark:
    """Kernel whose four warps meet at a barrier, the first warp after ``count`` dependent FMAs."""
    fma = "fma.rn.f32 %f1, %f1, %f2, %f2;\n"
    return Microbenchmark(
        "mov.b32 %f1, 0f3F800000;\nmov.b32 %f2, 0f3F800000;\nmov.u32 %r1, %tid.x;\n"
        f"setp.ge.u32 %p1, %r1, 32;\n@%p1 bra MEET;\n{fma * count}MEET:\nbar.sync 0;",
        128,
    )


def stream(
    threads: int, loads: int, count: int, ctas: int = 1, store: bool = False, hint: str = ""
) -> Microbenchmark:
    """Kernel of ``count`` rounds: each thread loads ``loads`` x 16 bytes and uses or stores them.

    Args:
        threads: number of threads of a CTA.
        loads: loads in flight at once.
        count: number of rounds.
        ctas: number of CTAs of the grid.
        store: whether to store the loaded data.
        hint: modifiers of the loads, such as ".L1::no_allocate".
    """
    body, fetch, use = [_OWN_PLACE], [], []
    for number in range(loads):
        first = 4 * number
        names = "{" + ", ".join(f"%r{8 + first + n}" for n in range(4)) + "}"
        at = f"[%rd1+{16 * threads * ctas * number}]"
        fetch.append(f"ld.global{hint}.v4.b32 {names}, {at};\n")
        use.append(
            f"st.global.v4.b32 {at}, {names};\n" if store else f"xor.b32 %r1, %r1, %r{8 + first};\n"
        )
    step = f"add.u64 %rd1, %rd1, {16 * threads * loads * ctas};\n"
    body += ["".join(fetch + use) + step] * count
    nbytes = 16 * threads * loads * ctas * count
    return Microbenchmark("".join(body), threads, ctas, data=nbytes)


_OWN_PLACE = """
ld.param.u64 %rd1, [data];
mov.u32 %r1, %tid.x;
mov.u32 %r2, %ntid.x;
mov.u32 %r3, %ctaid.x;
mad.lo.s32 %r4, %r2, %r3, %r1;
mul.wide.u32 %rd2, %r4, 16;
add.u64 %rd1, %rd1, %rd2;
mov.u32 %r40, dynamic;
mad.lo.s32 %r41, %r1, 16, %r40;
"""


def async_stream(threads: int, stages: int, count: int, ctas: int = 1) -> Microbenchmark:
    """Loop of cp.async with 16 bytes per thread in each group and ``stages`` groups in flight."""
    copy = (
        "cp.async.cg.shared.global [%r41+{place}], [%rd1], 16;\ncp.async.commit_group;\n"
        f"cp.async.wait_group {stages - 1};\nadd.u64 %rd1, %rd1, {16 * threads * ctas};\n"
    )
    rounds = [copy.format(place=16 * threads * (n % stages)) for n in range(count)]
    body = _OWN_PLACE + "".join(rounds) + "cp.async.wait_all;"
    nbytes = 16 * threads * ctas * count
    return Microbenchmark(body, threads, ctas, 16 * threads * stages, nbytes)
