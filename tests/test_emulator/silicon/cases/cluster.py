"""Clusters: other CTAs' addresses, memory and barriers, multicast, st.async, red.async."""

from collections.abc import Iterator

import numpy as np

from tests.test_emulator.silicon.case import Case, TensorMap
from tests.test_emulator.silicon.cases.banks import bank
from tests.test_emulator.silicon.cases.script import Script
from tests.test_emulator.silicon.cases.tensor import coordinates, numbered
from tests.test_emulator.silicon.ptx_text import (
    PROLOGUE,
    dump,
    fill,
    module,
    shared_array,
    wait,
)

_THREADS = 32
_SIZE = 1024
_SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
# %rank and %peer, the next CTA of the cluster; %far is the peer's smem and %farbar the peer's bars.
_PEER = """\
.reg .b32 %rank, %ranks, %peer, %far, %farbar;
mov.u32 %rank, %cluster_ctarank; mov.u32 %ranks, %cluster_nctarank;
add.u32 %peer, %rank, 1; rem.u32 %peer, %peer, %ranks;
mapa.shared::cluster.u32 %far, %base, %peer; mapa.shared::cluster.u32 %farbar, %bar, %peer;"""


def _addresses(name: str, grid: tuple[int, int, int], cluster: tuple[int, int, int]) -> Case:
    """Address of the array in every rank, and the rank of each address."""
    script = Script(name, 1, grid=grid, cluster=cluster)
    for rank in range(int(np.prod(cluster))):
        # Offset from the own array: ranks are 2^24 apart.
        script.keep(
            f"mapa to rank {rank}",
            f"mapa.shared::cluster.u32 %r1, %base, {rank}; sub.u32 %r0, %r1, %base;",
        )
        script.keep(f"getctarank of rank {rank}", "getctarank.shared::cluster.u32 %r0, %r1;")
        script.run("cvt.u64.u32 %d0, %base; cvta.shared.u64 %d0, %d0;")
        script.run(f"mapa.u64 %d1, %d0, {rank};")
        script.keep(f"getctarank of generic rank {rank}", "getctarank.u64 %r0, %d1;")
        for space in ("shared::cta", "shared::cluster"):
            script.ask(f"isspacep.{space} of rank {rank}", f"isspacep.{space} %p0, %d1;")
    script.keep("getctarank of a bare address", "getctarank.shared::cluster.u32 %r0, %base;")
    return script.case()


def _remote(ranks: int) -> Case:
    """Loads, stores and atomics on the next CTA's shared memory."""
    threads = _THREADS
    script = Script(f"remote_{ranks}", threads, grid=(ranks * 2, 1, 1), cluster=(ranks, 1, 1))
    script.run(_PEER)
    script.run("mad.lo.u32 %r1, %tid_x, 4, %base; mad.lo.u32 %r2, %tid_x, 4, %far;")
    script.run("mad.lo.u32 %r3, %cta_x, 1000, %tid_x;")
    for offset in range(0, 1024, 128):
        script.run(f"add.u32 %r4, %r3, {offset * 7}; st.shared.b32 [%r1+{offset}], %r4;")
    script.run(_SYNC)
    script.keep("ld.shared::cluster.b32", "ld.shared::cluster.b32 %r0, [%r2];")
    script.keep("ld.shared::cluster.u16", "ld.shared::cluster.u16 %r0, [%r2+128];")
    script.keep(
        "ld.relaxed.cluster.shared::cluster",
        "ld.relaxed.cluster.shared::cluster.b32 %r0, [%r2+128];",
    )
    script.run(
        "mad.lo.u32 %r5, %tid_x, 12, %r2; ld.shared::cluster.v4.b32 {%r6, %r7, %r8, %r9}, [%r5];"
    )
    for register in ("%r6", "%r7", "%r8", "%r9"):
        script.keep(f"v4 {register}", "", register)
    script.run("cvt.u64.u32 %d0, %r1; cvta.shared.u64 %d0, %d0; mapa.u64 %d1, %d0, %peer;")
    script.keep("generic ld", "ld.b32 %r0, [%d1+256];")
    script.run(f"{_SYNC} st.shared::cluster.b32 [%r2], %r3; st.b32 [%d1+128], %r3;")
    operations = ("add.u32", "min.s32", "max.u32", "xor.b32", "exch.b32")
    for row, operation in enumerate(operations):
        script.keep(
            f"atom.shared::cluster.{operation}",
            f"atom.shared::cluster.{operation} %r0, [%r2+{256 + 128 * row}], %r3;",
        )
    script.run(f"red.shared::cluster.add.u32 [%r2+{256 + 128 * len(operations)}], 3; {_SYNC}")
    for offset in range(0, 1024, 128):
        script.keep(f"word at {offset} after", f"ld.shared.b32 %r0, [%r1+{offset}];")
    return script.case(1024)


def _arrivals(ranks: int) -> Case:
    """Every CTA arrives on the next CTA's mbarriers, and sees its own mbarriers complete."""
    script = Script(f"arrivals_{ranks}", _THREADS, grid=(ranks, 1, 1), cluster=(ranks, 1, 1))
    script.run(_PEER)
    script.run("@%main mbarrier.init.shared::cta.b64 [%bar], 32;")
    script.run("@%main mbarrier.init.shared::cta.b64 [%bar+8], 5;")
    script.run("@%main mbarrier.init.shared::cta.b64 [%bar+16], 1;")
    script.run(f"@%main fence.mbarrier_init.release.cluster; {_SYNC}")
    script.run("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%farbar];")
    script.run(wait("%bar", 0, "EACH"))
    script.ask("own barrier of 32", "mbarrier.test_wait.parity.shared::cta.b64 %p0, [%bar], 0;")
    script.run("@%main mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%farbar+8], 5;")
    script.run("add.u32 %r9, %bar, 8;" + wait("%r9", 0, "FIVE"))
    # Expected here, completed by the peer.
    script.run(
        "@%main mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%farbar+16], 96;"
    )
    script.run("@%main mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%farbar+16], 96;")
    script.run("add.u32 %r9, %bar, 16;" + wait("%r9", 0, "BYTES"))
    script.ask("no second phase", "mbarrier.test_wait.parity.shared::cta.b64 %p0, [%bar+16], 1;")
    script.run(_SYNC)
    return script.case()


def _asynchronous() -> Case:
    """st.async and red.async to the next CTA, counted in bytes by its mbarrier."""
    script = Script("asynchronous", _THREADS, grid=(4, 1, 1), cluster=(2, 1, 1))
    script.run(_PEER)
    script.run(fill(_SIZE, _THREADS, 7))
    script.run("@%main mbarrier.init.shared::cta.b64 [%bar], 1;")
    script.run(
        "@%main mbarrier.init.shared::cta.b64 [%bar+8], 1; fence.mbarrier_init.release.cluster;"
    )
    due = 32 * (4 + 8 + 16)
    script.run(f"@%main mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {due};")
    script.run(
        f"@%main mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar+8], {32 * 4 * 4}; {_SYNC}"
    )
    script.run("mad.lo.u32 %r1, %tid_x, 4, %far; mad.lo.u32 %r2, %tid_x, 8, %far;")
    script.run("mad.lo.u32 %r3, %tid_x, 16, %far; mad.lo.u32 %r4, %cta_x, 1000, %tid_x;")
    script.run("add.u32 %r5, %r4, 100; add.u32 %r6, %r4, 200; add.u32 %r7, %r4, 300;")
    head = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
    script.run(f"{head.replace('.weak', '')}.u32 [%r1], %r4, [%farbar];")
    script.run(f"{head}.v2.b32 [%r2+128], {{%r4, %r5}}, [%farbar];")
    script.run(f"{head}.v4.b32 [%r3+384], {{%r4, %r5, %r6, %r7}}, [%farbar];")
    script.run(wait("%bar", 0, "STORED"))
    head = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes"
    for row, operation in enumerate(("add.u32", "max.s32", "xor.b32", "inc.u32")):
        script.run(f"{head}.{operation} [%far+{896 + 16 * row}], %r5, [%farbar+8];")
    script.run("add.u32 %r9, %bar, 8;" + wait("%r9", 0, "REDUCED") + _SYNC)
    for part in range(_SIZE // 128):
        script.keep(
            f"words from {part * 128}",
            f"mad.lo.u32 %r8, %tid_x, 4, %base; ld.shared.b32 %r0, [%r8+{part * 128}];",
        )
    return script.case(_SIZE)


def _multicast(ranks: int, mask: int, issuer: int) -> Case:
    """One CTA loads a box into all CTAs of a mask, at the same offset in each."""
    body = [
        PROLOGUE,
        f"{_PEER}\n.reg .b32 %c<2>, %due; mov.b32 %due, 512;",
        fill(_SIZE, _THREADS),
        "@%main mbarrier.init.shared::cta.b64 [%bar], 1;",
        "@%main fence.mbarrier_init.release.cluster;",
        "fence.proxy.async; bar.sync 0;",
        "@%main mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], %due;",
        _SYNC,
        f"setp.eq.u32 %p1, %rank, {issuer}; and.pred %p1, %p1, %main; @!%p1 bra ISSUED;",
        f"mov.b16 %h0, {mask};",
        "mov.b32 %c0, 24; mov.b32 %c1, 2;",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        f".multicast::cluster [smem], [%map, {coordinates(2)}], [%bar], %h0;",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [smem+512], [%tensor], 256, [%bar], %h0;",
        "ISSUED:",
        f"shl.b32 %r1, 1, %rank; and.b32 %r1, %r1, {mask}; setp.eq.u32 %p2, %r1, 0;",
        "@%p2 bra LOADED;",
        wait("%bar", 0, "WAIT"),
        "LOADED:",
        _SYNC,
        f"mad.wide.u32 %d1, %cta_x, {_SIZE}, %out;",
        dump(_SIZE, _THREADS, "%d1"),
    ]
    return Case(
        f"multicast_{ranks}_{mask:x}_from_{issuer}",
        module(["tensor", "out"], body, maps=["map"], declarations=shared_array(_SIZE)),
        {"tensor": numbered(2048)},
        {"out": np.zeros((ranks, _SIZE), "u1")},
        grid=(ranks, 1, 1),
        block=(_THREADS, 1, 1),
        cluster=(ranks, 1, 1),
        maps={"map": TensorMap("tensor", "u16", (32, 16), (64,), (16, 8))},
    )


def _copies() -> Iterator[Case]:
    """Bulk copies and reductions from one CTA's shared memory to the next CTA's."""
    forms = [""] + [f"{o}.{k}" for k in ("u32", "s32") for o in ("add", "min", "max")]
    forms += ["inc.u32", "dec.u32", "and.b32", "or.b32", "xor.b32", "add.u64"]
    for form in forms:
        opcode = "cp.reduce.async" if form else "cp.async"
        body = [
            PROLOGUE,
            _PEER,
            "mad.wide.u32 %d0, %tid_x, 4, %source; mad.lo.u32 %r0, %tid_x, 4, %base;",
            "mul.wide.u32 %d1, %cta_x, 128; add.u64 %d0, %d0, %d1;",
            "ld.global.b32 %r1, [%d0]; st.shared.b32 [%r0], %r1;",
            "ld.global.b32 %r2, [%d0+256]; st.shared.b32 [%r0+512], %r2;",
            "@%main mbarrier.init.shared::cta.b64 [%bar], 1;",
            "@%main fence.mbarrier_init.release.cluster;",
            "@%main mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 128;",
            f"fence.proxy.async; {_SYNC} @!%main bra ISSUED;",
            f"{opcode}.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
            f"{'.' + form if form else ''} [%far], [smem+512], 128, [%farbar];",
            "ISSUED:",
            wait("%bar", 0, "WAIT"),
            "ld.shared.b32 %r3, [%r0]; mad.wide.u32 %d2, %tid_x, 4, %out; add.u64 %d2, %d2, %d1;",
            f"st.global.b32 [%d2], %r3; {_SYNC}",
        ]
        yield Case(
            f"copy_{form or 'plain'}",
            module(["source", "out"], body, declarations=shared_array(_SIZE)),
            {"source": bank("u32", 2, 128)},
            {"out": np.zeros((2, 32), "u4")},
            grid=(2, 1, 1),
            block=(_THREADS, 1, 1),
            cluster=(2, 1, 1),
        )


def cases() -> Iterator[Case]:
    yield _addresses("addresses_2x1x1", (4, 1, 1), (2, 1, 1))
    yield _addresses("addresses_1x2x2", (2, 2, 2), (1, 2, 2))
    yield _addresses("addresses_4x2x1", (4, 2, 1), (4, 2, 1))
    for ranks in (2, 4):
        yield _remote(ranks)
        yield _arrivals(ranks)
    yield _asynchronous()
    for ranks, mask, issuer in ((2, 3, 0), (2, 3, 1), (2, 2, 0), (4, 15, 2), (4, 10, 0), (4, 4, 3)):
        yield _multicast(ranks, mask, issuer)
    yield from _copies()
