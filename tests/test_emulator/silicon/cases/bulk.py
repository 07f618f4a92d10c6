"""Bulk copies without a tensor map, their reductions, and tensor maps changed on the GPU."""

from collections.abc import Iterator

import numpy as np

from tests.test_emulator.silicon.case import Array, Case, TensorMap
from tests.test_emulator.silicon.cases.banks import bank
from tests.test_emulator.silicon.cases.tensor import numbered
from tests.test_emulator.silicon.ptx_text import (
    PROLOGUE,
    dump,
    fill,
    module,
    shared_array,
    upload,
    wait,
)

_THREADS = 32
_SIZE = 1024
_REDUCTIONS = {
    "u32": ("add", "min", "max", "inc", "dec"),
    "s32": ("add", "min", "max"),
    "u64": ("add", "min", "max"),
    "s64": ("min", "max"),
    "b32": ("and", "or", "xor"),
    "b64": ("and", "or", "xor"),
    "f16": ("add.noftz", "min", "max"),
    "bf16": ("add.noftz", "min", "max"),
    "f32": ("add",),
    "f64": ("add",),
}
_TO_SHARED = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


def _loads() -> Case:
    """Copies of 16 bytes or more to shared memory; two of the copies share an mbarrier."""
    parts = ((0, 0, 16), (48, 32, 48), (128, 512, 320), (1008, 112, 16), (560, 896, 112))
    body = [
        PROLOGUE,
        fill(_SIZE, _THREADS),
        "@%main mbarrier.init.shared::cta.b64 [%bar], 1;",
        "fence.proxy.async; bar.sync 0; @!%main bra LOADED;",
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {sum(p[2] for p in parts)};",
    ]
    for source, target, size in parts:
        body.append(f"{_TO_SHARED} [smem+{target}], [%source+{source}], {size}, [%bar];")
    body += ["LOADED:", wait("%bar", 0, "WAIT"), dump(_SIZE, _THREADS, "%out")]
    return Case(
        "loads",
        module(["source", "out"], body, declarations=shared_array(_SIZE)),
        {"source": numbered(2048)},
        {"out": np.zeros(_SIZE, "u1")},
        block=(_THREADS, 1, 1),
    )


def _stores() -> Case:
    """Copies from shared to global memory, with a wait for the reads, then for the writes."""
    parts = ((0, 0, 16), (48, 32, 48), (128, 512, 320), (1008, 112, 16))
    body = [
        PROLOGUE,
        upload(_SIZE, _THREADS, "%source"),
        "fence.proxy.async; bar.sync 0; @!%main bra STORED;",
        "prefetch.global.L2 [%out]; cp.async.bulk.prefetch.L2.global [%source], 64;",
    ]
    for source, target, size in parts:
        body.append(
            f"cp.async.bulk.global.shared::cta.bulk_group [%out+{target}], [smem+{source}], {size};"
        )
        body.append("cp.async.bulk.commit_group;")
    body += ["cp.async.bulk.wait_group.read 1; cp.async.bulk.wait_group 0;", "STORED:"]
    return Case(
        "stores",
        module(["source", "out"], body, declarations=shared_array(_SIZE)),
        {"source": numbered(_SIZE)},
        {"out": np.full(2048, 0xA5, "u1")},
        block=(_THREADS, 1, 1),
    )


def _operands(kind: str, column: int, lanes: int) -> Array:
    name = f"u{kind[1:]}" if kind[0] in "sb" and kind != "bf16" else kind
    return bank(name, column, lanes)


def _reductions() -> Iterator[Case]:
    """Reductions of a shared array into global memory, for every operation and type.

    add.f32 keeps subnormals here, unlike red.global.add.f32.
    """
    for kind, operations in _REDUCTIONS.items():
        width = 8 if kind.endswith("64") else 2 if kind.endswith("f16") else 4
        lanes = 1024
        size = width * lanes
        for operation in operations:
            body = [
                PROLOGUE,
                upload(size, 256, "%source"),
                "fence.proxy.async; bar.sync 0; @!%main bra STORED;",
                f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{kind}"
                f" [%out], [%base], {size};",
                "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
                "STORED:",
            ]
            yield Case(
                f"reduce_{operation}_{kind}",
                module(["source", "out"], body, declarations=shared_array(size)),
                {"source": _operands(kind, 1, lanes)},
                {"out": _operands(kind, 0, lanes).copy()},
                block=(256, 1, 1),
            )


# Fields to replace: (name and width, operands after the address).
_FIELDS = {
    "dimensions": [("global_dim b32", "0, 30"), ("global_dim b32", "1, 5")],
    "strides": [("global_stride b64", "0, 128")],
    "box": [("box_dim b32", "0, 8"), ("box_dim b32", "1, 8")],
    "element_stride": [("element_stride b32", "1, 2")],
    "type": [("elemtype b32", "6")],
    "swizzle": [("swizzle_mode b32", "1")],
    "fill": [("fill_mode b32", "1"), ("elemtype b32", "6")],
    "address": [("global_address b64", "%d5")],
    "rank": [
        ("rank b32", "2"),
        ("global_dim b32", "2, 2"),
        ("global_stride b64", "1, 512"),
        ("box_dim b32", "2, 2"),
        ("element_stride b32", "2, 1"),
    ],
    "interleave": [("interleave_layout b32", "0")],
}


def _replaced(name: str, fields: list[tuple[str, str]], bytes_due: int) -> Case:
    """Copy a descriptor to shared memory, replace fields, publish the copy, and load with it."""
    rank = 3 if name == "rank" else 2
    box = "{" + ", ".join(["%r1"] * rank) + "}"
    body = [
        PROLOGUE,
        "mad.wide.u32 %d0, %tid_x, 4, %map; mad.lo.u32 %r0, %tid_x, 4, %base;",
        "ld.b32 %r1, [%d0]; st.shared.b32 [%r0], %r1; add.u64 %d5, %tensor, 64;",
        "bar.warp.sync -1; @!%main bra CHANGED;",
        *(
            f"tensormap.replace.tile.{field.split()[0]}.shared::cta.b1024.{field.split()[1]}"
            f" [smem], {operands};"
            for field, operands in fields
        ),
        "CHANGED: bar.warp.sync -1;",
        # Word 0 is an address; the other changed words are recorded.
        "ld.shared.b32 %r1, [%r0]; setp.lt.u32 %p0, %tid_x, 2; selp.b32 %r1, 0, %r1, %p0;",
        "mad.wide.u32 %d1, %tid_x, 4, %words; st.global.b32 [%d1], %r1;",
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
        " [%changed], [smem], 128;",
        "fence.proxy.tensormap::generic.acquire.gpu [%changed], 128; bar.warp.sync -1;",
        fill(_SIZE, _THREADS),
        "@%main mbarrier.init.shared::cta.b64 [%bar], 1;",
        "fence.proxy.async; bar.sync 0; @!%main bra LOADED;",
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {bytes_due}; mov.u32 %r1, 0;",
        "cvta.global.u64 %d2, %changed;",
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        f" [smem], [%d2, {box}], [%bar];",
        "LOADED:",
        wait("%bar", 0, "WAIT"),
        dump(_SIZE, _THREADS, "%out"),
        # The address differs from run to run.
        "bar.warp.sync -1; mov.b32 %r1, 0; mad.wide.u32 %d1, %tid_x, 4, %changed;",
        "st.global.b32 [%d1], %r1;",
    ]
    pointers = ["tensor", "words", "changed", "out"]
    return Case(
        f"replace_{name}",
        module(pointers, body, maps=["map"], declarations=shared_array(_SIZE)),
        {"tensor": numbered(2048)},
        {"words": np.zeros(32, "u4"), "changed": np.zeros(32, "u4"), "out": np.zeros(_SIZE, "u1")},
        block=(_THREADS, 1, 1),
        maps={"map": TensorMap("tensor", "u16", (32, 16), (64,), (16, 16))},
    )


def cases() -> Iterator[Case]:
    yield _loads()
    yield _stores()
    yield from _reductions()
    for name, fields in _FIELDS.items():
        due = {"box": 128, "element_stride": 256, "rank": 1024}.get(name, 512)
        yield _replaced(name, fields, due)
