"""Loads and stores of every width, matrix loads and stores, and cp.async."""

from collections.abc import Iterator

import numpy as np

from tests.test_emulator.silicon.case import Array, Case, random_array
from tests.test_emulator.silicon.ptx_text import PROLOGUE, dump, fill, module, shared_array, upload

_LANES = 32
_PITCH = 32  # bytes of each lane, and 8 bytes for each of up to four result registers

# (vector and type, register width)
_LOADS = (
    [(kind, width) for kind in ("u8", "s8", "b8") for width in (16, 32, 64)]
    + [(kind, width) for kind in ("u16", "s16", "b16") for width in (16, 32, 64)]
    + [(kind, width) for kind in ("u32", "s32", "b32") for width in (32, 64)]
    + [("b64", 64), ("v2.b8", 16), ("v4.u8", 32), ("v4.s8", 16), ("v2.s16", 32), ("v4.b16", 16)]
    + [("v2.b32", 32), ("v4.f32", 32), ("v2.u32", 64), ("v2.b64", 64), ("b128", 128)]
)
_STORES = (
    [("b8", width) for width in (16, 32, 64)]
    + [("u16", width) for width in (16, 32, 64)]
    + [("b32", 32), ("s32", 64), ("b64", 64), ("v2.b8", 16), ("v4.u8", 32), ("v2.u16", 32)]
    + [("v4.b16", 16), ("v2.b32", 32), ("v4.f32", 32), ("v2.b64", 64), ("b128", 128)]
)


def _registers(form: str, width: int) -> tuple[list[str], str]:
    """Registers of one access, and their operand text."""
    count = int(form[1]) if form[0] == "v" else 1
    names = [f"%x{i}" for i in range(count)]
    return names, "{" + ", ".join(names) + "}" if count > 1 else names[0]


def _loads(name: str, prefix: str, place: str) -> Case:
    """Loads, with a row per form that holds every lane's registers in 8 bytes each."""
    size = _LANES * _PITCH
    body = [
        PROLOGUE,
        upload(size, _LANES, "%source"),
        f".local .align 16 .b8 stack[{_PITCH}];",
        "bar.warp.sync -1;",
        f"mad.lo.u32 %r0, %tid_x, {_PITCH}, %base;",
        f"mad.wide.u32 %d0, %tid_x, {_PITCH}, %source; mad.wide.u32 %d1, %tid_x, {_PITCH}, %out;",
        "cvta.global.u64 %d2, %d0; cvt.u64.u32 %d3, %r0; cvta.shared.u64 %d3, %d3;",
        "mov.u64 %d4, stack;",
    ]
    if place == "%d4":
        for offset in range(0, _PITCH, 8):
            body.append(f"ld.global.b64 %d5, [%d0+{offset}]; st.local.b64 [%d4+{offset}], %d5;")
    for row, (form, width) in enumerate(_LOADS):
        names, operand = _registers(form, width)
        body.append(f"{{ .reg .b{width} {', '.join(names)}; .reg .b64 %lo, %hi;")
        body.append(f"{prefix}.{form} {operand}, [{place}];")
        target = row * _LANES * _PITCH
        if width == 128:
            body.append("mov.b128 {%lo, %hi}, %x0;")
            body.append(f"st.global.v2.b64 [%d1+{target}], {{%lo, %hi}};")
        for position, register in enumerate(names if width < 128 else ()):
            body.append(f"st.global.b{width} [%d1+{target + 8 * position}], {register};")
        body.append("}")
    return Case(
        name,
        module(["source", "out"], body, declarations=shared_array(size)),
        {"source": random_array("loads", (size,), "u1")},
        {"out": np.zeros((len(_LOADS), size), "u1")},
        rows={"out": [f"{prefix}.{form} to b{width}" for form, width in _LOADS]},
    )


def _stores(name: str, prefix: str, place: str) -> Case:
    """Stores, with a row per form that holds the bytes stored over 0xA5."""
    size = _LANES * _PITCH
    body = [
        PROLOGUE,
        f"mad.lo.u32 %r0, %tid_x, {_PITCH}, %base; mad.wide.u32 %d1, %tid_x, {_PITCH}, %out;",
        f"mad.wide.u32 %d2, %tid_x, {_PITCH}, %source; cvta.global.u64 %d3, %d1;",
        "cvt.u64.u32 %d4, %r0; cvta.shared.u64 %d4, %d4;",
    ]
    for row, (form, width) in enumerate(_STORES):
        names, operand = _registers(form, width)
        body += [fill(size, _LANES), "bar.warp.sync -1;"]
        body.append(f"{{ .reg .b{width} {', '.join(names)}; .reg .b64 %lo, %hi;")
        if width == 128:
            body.append("ld.global.v2.b64 {%lo, %hi}, [%d2]; mov.b128 %x0, {%lo, %hi};")
        for position, register in enumerate(names if width < 128 else ()):
            body.append(f"ld.global.b{width} {register}, [%d2+{8 * position}];")
        if "%r0" in place or "%d4" in place:
            body.append(f"{prefix}.{form} [{place}], {operand}; }}")
            body += ["bar.warp.sync -1;", f"add.u64 %d5, %out, {row * size};"]
            body += [dump(size, _LANES, "%d5"), "bar.warp.sync -1;"]
        else:
            body.append(f"{prefix}.{form} [{place}+{row * size}], {operand}; }}")
    return Case(
        name,
        module(["source", "out"], body, declarations=shared_array(size)),
        {"source": random_array("stores", (size,), "u1")},
        {"out": np.full((len(_STORES), size), 0xA5, "u1")},
        rows={"out": [f"{prefix}.{form} from b{width}" for form, width in _STORES]},
    )


def _matrix_rows(seed: str) -> Array:
    """Offsets of 16-byte rows in 2 KB of shared memory, in random order, one per lane."""
    order = np.argsort(random_array(seed, (128,), "u4"), kind="stable")[:32]
    return (order * 16).astype("u4")


def _matrix() -> Case:
    """Every ldmatrix and stmatrix form of 8x8 matrices of 16-bit elements."""
    size = 2048
    body = [
        PROLOGUE,
        upload(size, _LANES, "%source"),
        "bar.warp.sync -1;",
        "mad.wide.u32 %d0, %tid_x, 4, %rows; ld.global.b32 %r0, [%d0]; add.u32 %r0, %r0, %base;",
        "mad.wide.u32 %d1, %tid_x, 16, %loaded;",
    ]
    labels: dict[str, list[str]] = {"loaded": [], "stored": []}
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            opcode = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
            names = ", ".join(f"%r{i + 1}" for i in range(count))
            body.append(f"{opcode} {{{names}}}, [%r0];")
            offset = len(labels["loaded"]) * _LANES * 16
            for i in range(count):
                body.append(f"st.global.b32 [%d1+{offset + 4 * i}], %r{i + 1};")
            labels["loaded"].append(opcode)
    body.append(
        "mad.wide.u32 %d2, %tid_x, 16, %source; ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d2];"
    )
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            opcode = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
            names = ", ".join(f"%r{i + 1}" for i in range(count))
            offset = len(labels["stored"]) * size
            body += ["bar.warp.sync -1;", fill(size, _LANES), "bar.warp.sync -1;"]
            body += [f"{opcode} [%r0], {{{names}}};", "bar.warp.sync -1;"]
            body += [f"add.u64 %d3, %stored, {offset};", dump(size, _LANES, "%d3")]
            labels["stored"].append(opcode)
    return Case(
        "matrix",
        module(["source", "rows", "loaded", "stored"], body, declarations=shared_array(size)),
        {"source": np.arange(size // 2, dtype="u2"), "rows": _matrix_rows("matrix")},
        {"loaded": np.zeros((6, _LANES, 4), "u4"), "stored": np.zeros((6, size), "u1")},
        rows=labels,
    )


def _copies() -> Case:
    """cp.async with every size, source sizes that fill with zeros, and the ignore-src predicate."""
    forms = [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)]
    size = _LANES * _PITCH
    body = [
        PROLOGUE,
        f"mad.lo.u32 %r0, %tid_x, {_PITCH}, %base; mad.wide.u32 %d0, %tid_x, {_PITCH}, %source;",
        "and.b32 %r1, %tid_x, 1; setp.ne.u32 %p0, %r1, 0;",
    ]
    labels: list[str] = []
    for cache, width in forms:
        for hint in ("", ".L2::128B"):
            opcode = f"cp.async.{cache}.shared.global{hint}"
            for extra, label in (
                ("", ""),
                (", %r2", f", tid % {width + 1}"),
                (", %p0", ", odd lanes ignore"),
            ):
                body += [
                    fill(size, _LANES),
                    "bar.warp.sync -1;",
                    f"rem.u32 %r2, %tid_x, {width + 1};",
                ]
                body.append(f"{opcode} [%r0], [%d0], {width}{extra};")
                body += ["cp.async.commit_group; cp.async.wait_group 0;", "bar.warp.sync -1;"]
                body.append(f"add.u64 %d1, %out, {len(labels) * size};")
                body += [dump(size, _LANES, "%d1"), "bar.warp.sync -1;"]
                labels.append(f"{opcode} [d], [s], {width}{label}")
    return Case(
        "copies",
        module(["source", "out"], body, declarations=shared_array(size)),
        {"source": random_array("copies", (size,), "u1")},
        {"out": np.zeros((len(labels), size), "u1")},
        rows={"out": labels},
    )


def cases() -> Iterator[Case]:
    yield _loads("loads_shared", "ld.shared", "%r0")
    yield _loads("loads_global", "ld.global", "%d0")
    yield _loads("loads_hinted", "ld.global.nc.L1::no_allocate.L2::128B", "%d0")
    yield _loads("loads_generic", "ld", "%d2")
    yield _loads("loads_generic_shared", "ld", "%d3")
    yield _loads("loads_local", "ld.local", "%d4")
    yield _stores("stores_shared", "st.shared", "%r0")
    yield _stores("stores_global", "st.global", "%d1")
    yield _stores("stores_generic", "st", "%d3")
    yield _stores("stores_generic_shared", "st", "%d4")
    yield _matrix()
    yield _copies()
