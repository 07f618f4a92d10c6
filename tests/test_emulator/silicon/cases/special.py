"""Special registers, CTA barriers, address spaces, and instructions without a visible effect."""

from collections.abc import Iterator

from tests.test_emulator.silicon.case import Case
from tests.test_emulator.silicon.cases.script import Script

_VECTORS = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid",
            "cluster_nctaid")  # fmt: skip
_SCALARS = ("laneid", "cluster_ctarank", "cluster_nctarank", "total_smem_size", "dynamic_smem_size",
            "aggr_smem_size")  # fmt: skip


def _registers(
    name: str, grid: tuple[int, int, int], cluster: tuple[int, int, int], dynamic: int = 0
) -> Case:
    script = Script(name, 2, grid=grid, cluster=cluster)
    for vector in _VECTORS:
        for axis in "xyz":
            script.keep(f"%{vector}.{axis}", f"mov.u32 %r0, %{vector}.{axis};")
    for scalar in _SCALARS:
        script.keep(f"%{scalar}", f"mov.u32 %r0, %{scalar};")
    script.ask("%is_explicit_cluster", "mov.pred %p0, %is_explicit_cluster;")
    script.keep("getctarank of own", "getctarank.shared::cluster.u32 %r0, %base;")
    return script.case(2048, dynamic)


def _barriers() -> Case:
    """Reductions over a CTA, named barriers of some of its warps, and arrivals without a wait."""
    script = Script("barriers", 128)
    script.run("and.b32 %r1, %tid_x, 3; setp.eq.u32 %p1, %r1, 0; setp.ge.u32 %p2, %tid_x, 0;")
    script.run("shr.u32 %r2, %tid_x, 5; setp.lt.u32 %p3, %r2, 2; and.b32 %r3, %tid_x, 31;")
    script.keep("bar.red.popc", "bar.red.popc.u32 %r0, 0, %p1;")
    script.keep("bar.red.popc inverted", "bar.red.popc.u32 %r0, 0, !%p1;")
    script.keep("barrier.cta.red.popc", "barrier.cta.red.popc.aligned.u32 %r0, 5, 128, %p2;")
    for name in ("and", "or"):
        for predicate in ("%p1", "%p2", "!%p2"):
            script.ask(f"bar.red.{name} {predicate}", f"bar.red.{name}.pred %p0, 1, {predicate};")
    script.run("setp.eq.u32 %p4, %r2, 3; @%p4 bra LATE;")
    script.run(
        "barrier.cta.red.popc.u32 %r4, 2, 96, %p1; bra JOINED; LATE: mov.u32 %r4, 77; JOINED:"
    )
    script.keep("barrier of three warps", "bar.sync 0;", "%r4")
    # Warps 0 and 1 write and arrive; warps 2 and 3 wait and read.
    script.run("mad.lo.u32 %r5, %tid_x, 4, %base; @%p3 st.shared.b32 [%r5], %tid_x;")
    script.run("@%p3 bra PRODUCED; bar.sync 3, 128; ld.shared.b32 %r6, [%r5+-256]; bra BOTH;")
    script.run("PRODUCED: bar.arrive 3, 128; mov.u32 %r6, 99; BOTH:")
    script.keep("read after bar.arrive", "bar.sync 0;", "%r6")
    script.keep("bar.warp.sync", "bar.warp.sync -1; mov.u32 %r0, 1;")
    return script.case(1024)


def _spaces() -> Case:
    """Address windows (isspacep), and conversions to generic addresses and back."""
    script = Script("spaces", 1)
    script.run(".local .align 8 .b8 stack[16]; st.local.b64 [stack], 0;")
    script.run("mov.u64 %d0, smem; cvta.shared.u64 %d0, %d0; mov.u64 %d1, stack;")
    script.run("cvta.local.u64 %d1, %d1; cvta.global.u64 %d2, %out;")
    for space in ("shared", "shared::cta", "shared::cluster", "local", "global", "param"):
        for name, register in (("shared", "%d0"), ("local", "%d1"), ("global", "%d2")):
            script.ask(f"isspacep.{space} of {name}", f"isspacep.{space} %p0, {register};")
    script.run("cvta.to.shared.u64 %d3, %d0; cvt.u32.u64 %r1, %d3;")
    script.ask("shared address back", "setp.eq.u32 %p0, %r1, %base;")
    script.run("cvta.to.global.u64 %d3, %d2;")
    script.ask("global address back", "setp.eq.u64 %p0, %d3, %out;")
    return script.case()


def _invisible() -> Case:
    """Fences, hints and launch control without a dependent launch: all must be accepted."""
    script = Script("invisible", 32)
    forms = [
        "griddepcontrol.wait;",
        "griddepcontrol.launch_dependents;",
        "nanosleep.u32 20;",
        "prefetch.global.L2 [%out];",
        "prefetch.global.L1 [%out];",
        "prefetchu.L1 [%out];",
        "applypriority.global.L2::evict_normal [%out], 128;",
        "createpolicy.fractional.L2::evict_first.b64 %d9, 1.0;",
        "membar.cta; membar.gl; membar.sys;",
        "fence.proxy.async; fence.proxy.async.global; fence.proxy.async.shared::cta;",
        "fence.proxy.alias; fence.mbarrier_init.release.cluster;",
        "cp.async.commit_group; cp.async.wait_group 0; cp.async.wait_all;",
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; cp.async.bulk.wait_group.read 0;",
    ]
    for order in ("sc", "acq_rel"):
        forms += [f"fence.{order}.{scope};" for scope in ("cta", "cluster", "gpu", "sys")]
    for form in forms:
        script.keep(form, f"{form} mov.u32 %r0, 1;")
    return script.case()


def cases() -> Iterator[Case]:
    yield _registers("registers_plain", (3, 2, 2), (1, 1, 1))
    yield _registers("registers_2x1x1", (4, 2, 1), (2, 1, 1), 512)
    yield _registers("registers_2x2x1", (4, 4, 2), (2, 2, 1))
    yield _registers("registers_1x2x4", (3, 2, 4), (1, 2, 4))
    yield _barriers()
    yield _spaces()
    yield _invisible()
