"""Errors that end a launch; recordings hold the driver's error, or the result without error."""

from collections.abc import Iterator

import numpy as np

from tests.test_emulator.silicon.case import Case, TensorMap
from tests.test_emulator.silicon.cases.tensor import numbered
from tests.test_emulator.silicon.ptx_text import PROLOGUE, fill, module, shared_array

_SIZE = 2048
_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_TENSOR = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
_STORE = "cp.async.bulk.global.shared::cta.bulk_group"
_INIT = "mbarrier.init.shared::cta.b64 [%bar], {}; fence.proxy.async;"
_PARITY = "mbarrier.test_wait.parity.shared::cta.b64 %p0, [%bar], 0; selp.b32 %r0, 1, 0, %p0;"

# Code of thread 0; %r0 is stored afterwards.
_SCRIPTS = {
    "trap": "trap;",
    "load_global_misaligned": "ld.volatile.global.v4.b32 {%r0, %r1, %r2, %r3}, [%tensor+4];",
    "load_shared_misaligned": "add.u32 %r1, %base, 2; ld.shared.b32 %r0, [%r1];",
    "load_shared_vector_misaligned": "ld.volatile.shared.v2.b32 {%r0, %r1}, [smem+4];",
    "load_shared_beyond": "add.u32 %r1, %base, 245760; ld.shared.b32 %r0, [%r1];",
    "load_null": "mov.u64 %d0, 0; ld.global.b32 %r0, [%d0];",
    "store_misaligned": "st.global.b64 [%tensor+4], 0;",
    "atomic_misaligned": "atom.global.add.u32 %r0, [%tensor+2], 1;",
    "bulk_size_8": f"{_INIT.format(1)} mov.u32 %r0, 8; {_BULK} [%base], [%tensor], %r0, [%bar];",
    "bulk_size_24": f"{_INIT.format(1)} mov.u32 %r0, 24; {_BULK} [%base], [%tensor], %r0, [%bar];",
    "tensor_multicast_outside": f"{_INIT.format(1)} mov.b16 %h0, 2;"
    f" {_TENSOR}.multicast::cluster [%base], [%map, {{0, 0}}], [%bar], %h0;",
    "bulk_size_0": f"{_INIT.format(1)} mov.u32 %r0, 0; {_BULK} [%base], [%tensor], %r0, [%bar];",
    "bulk_target_misaligned": f"{_INIT.format(1)} {_BULK} [smem+8], [%tensor], 16, [%bar];",
    "bulk_source_misaligned": f"{_INIT.format(1)} {_BULK} [%base], [%tensor+8], 16, [%bar];",
    "bulk_store_misaligned": f"{_STORE} [%tensor+8], [%base], 16; cp.async.bulk.commit_group;"
    " cp.async.bulk.wait_group 0;",
    "bulk_beyond_shared": f"{_INIT.format(1)} add.u32 %r1, %base, 245760;"
    f" {_BULK} [%r1], [%tensor], 64, [%bar];",
    "tensor_target_16": f"{_INIT.format(1)} {_TENSOR} [smem+16], [%map, {{0, 0}}], [%bar];",
    "tensor_target_64": f"{_INIT.format(1)} {_TENSOR} [smem+64], [%map, {{0, 0}}], [%bar];",
    "tensor_bad_map": f"{_INIT.format(1)} cvta.global.u64 %d0, %tensor;"
    f" {_TENSOR} [%base], [%d0, {{0, 0}}], [%bar];",
    "tensor_map_misaligned": f"{_INIT.format(1)} add.u64 %d0, %map, 32;"
    f" {_TENSOR} [%base], [%d0, {{0, 0}}], [%bar];",
    "barrier_misaligned": "add.u32 %r1, %bar, 4; mbarrier.init.shared::cta.b64 [%r1], 1;",
    "barrier_count_0": "ld.global.b32 %r1, [%out+16];"
    f" mbarrier.init.shared::cta.b64 [%bar], %r1; {_PARITY}",
    "barrier_count_2_20": f"mov.u32 %r1, 1048576; mbarrier.init.shared::cta.b64 [%bar], %r1;"
    f" mbarrier.arrive.shared::cta.b64 %d0, [%bar]; {_PARITY}",
    "barrier_arrive_3_of_2": f"{_INIT.format(2)} mbarrier.arrive.shared::cta.b64 %d0, [%bar], 3;"
    f" {_PARITY}",
    "barrier_arrive_0": f"{_INIT.format(2)} mov.u32 %r1, 0;"
    f" mbarrier.arrive.shared::cta.b64 %d0, [%bar], %r1; {_PARITY}",
    "barrier_expects_2_20": f"{_INIT.format(1)} mov.u32 %r1, 1048576;"
    f" mbarrier.arrive.expect_tx.shared::cta.b64 %d0, [%bar], %r1; {_PARITY}",
    "barrier_completes_2_20": f"{_INIT.format(1)} mov.u32 %r1, 1048577;"
    f" mbarrier.complete_tx.relaxed.cta.shared::cluster.b64 [%bar], %r1; {_PARITY}",
    "barrier_without_init": f"st.shared.b64 [%bar], 0; mbarrier.arrive.shared::cta.b64 %d0, [%bar];"
    f" {_PARITY}",
    "barrier_invalidated": f"{_INIT.format(1)} mbarrier.inval.shared::cta.b64 [%bar];"
    f" mbarrier.arrive.shared::cta.b64 %d0, [%bar]; {_PARITY}",
    "replace_misaligned": "add.u32 %r1, %base, 64;"
    " tensormap.replace.tile.rank.shared::cta.b1024.b32 [%r1], 1;",
    "rank_outside": "mapa.shared::cluster.u32 %r1, %base, 3; ld.shared::cluster.b32 %r0, [%r1];",
}
# The innermost coordinate must be a multiple of 16 bytes, here 8 elements.
for _place in (1, 2, 4, -1, -4):
    _SCRIPTS[f"tensor_load_at_{_place}"] = (
        f"{_INIT.format(1)} {_TENSOR} [%base], [%map, {{{_place}, 0}}], [%bar];"
    )
    _SCRIPTS[f"tensor_store_at_{_place}"] = (
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
        f" [%map, {{{_place}, 0}}], [%base];"
        " cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    )
# Code of every lane.
_WHOLE = {
    "matrix_misaligned": "mad.lo.u32 %r1, %tid_x, 16, %base; add.u32 %r1, %r1, 8;"
    " ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%r1];",
    "copy_misaligned": "mad.lo.u32 %r1, %tid_x, 16, %base; add.u32 %r1, %r1, 8;"
    " cp.async.cg.shared.global [%r1], [%tensor], 16; cp.async.wait_all;",
    "barrier_of_33": "mov.u32 %r1, 33; bar.sync 1, %r1;",
    "barrier_number_16": "mov.u32 %r1, 16; bar.sync %r1;",
}

# Class of ``tests.emulator.findings`` that the emulator must report. An H200 continues after some:
# bulk copies move whole units of 16 bytes (8 move nothing, 24 move 16); barrier 16 and a
# misaligned tensor map in shared memory pass; so do an mbarrier of count 0 (complete at once), an
# arrival of 0 and an arrival after inval.
FINDINGS = {
    "trap": "KernelAssertion",
    **dict.fromkeys(
        (name for name in (*_SCRIPTS, *_WHOLE) if name.endswith("misaligned")), "Misaligned"
    ),
    **dict.fromkeys(("load_shared_beyond", "load_null", "bulk_beyond_shared"), "OutOfBounds"),
    **dict.fromkeys(("tensor_multicast_outside", "rank_outside"), "OutOfBounds"),
    **dict.fromkeys(("tensor_target_16", "tensor_target_64"), "Misaligned"),
    **dict.fromkeys(("bulk_size_8", "bulk_size_24"), "IllegalInstruction"),
    **dict.fromkeys((n for n in _SCRIPTS if "_at_" in n), "IllegalInstruction"),
    **dict.fromkeys(("tensor_bad_map", "tensor_map_misaligned"), "IllegalInstruction"),
    **dict.fromkeys((n for n in (*_SCRIPTS, *_WHOLE) if n.startswith("barrier_")), "BarrierMisuse"),
}


def cases() -> Iterator[Case]:
    for name, text in (_SCRIPTS | _WHOLE).items():
        around = ("@!%main bra OVER;", "OVER:") if name in _SCRIPTS else ("", "")
        body = [
            PROLOGUE,
            fill(_SIZE, 32),
            "mov.u32 %r0, 0; fence.proxy.async; bar.sync 0;",
            around[0],
            text,
            "nanosleep.u32 1000000;",  # time for asynchronous copies to fail
            "ld.shared.b32 %r1, [smem]; ld.shared.b32 %r2, [smem+8]; ld.shared.b32 %r3, [smem+16];",
            "@%main st.global.v4.b32 [%out], {%r0, %r1, %r2, %r3};",
            around[1],
        ]
        yield Case(
            name,
            module(["tensor", "out"], body, maps=["map"], declarations=shared_array(_SIZE)),
            {"tensor": numbered(2048)},
            {"out": np.array([0xA5A5A5A5] * 4 + [0] * 4, "u4")},
            block=(32, 1, 1),
            maps={"map": TensorMap("tensor", "u16", (32, 16), (64,), (16, 8))},
        )
