"""Builder of whole PTX modules around a kernel body, and text fragments for bodies."""

from collections.abc import Iterable


def module(
    pointers: Iterable[str],
    body: Iterable[str],
    *,
    maps: Iterable[str] = (),
    declarations: str = "",
) -> str:
    """PTX module with one entry named ``kernel``.

    Args:
        pointers: names of global arrays, each a ``.u64`` parameter loaded to ``%<name>``.
        body: lines of instructions.
        maps: names of tensor maps, 128-byte parameters with generic addresses in ``%<name>``.
        declarations: module-scope variables.
    """
    pointers, maps = list(pointers), list(maps)
    parameters = [f".param .u64 p_{name}" for name in pointers]
    parameters += [f".param .align 64 .b8 p_{name}[128]" for name in maps]
    lines = [".version 8.6", ".target sm_90a", ".address_size 64", ""]
    if declarations:
        lines += [declarations, ""]
    lines += [".visible .entry kernel(", ",\n".join(parameters), ")", "{"]
    for name in pointers:
        lines.append(f".reg .b64 %{name};")
        lines.append(f"ld.param.u64 %{name}, [p_{name}];")
        lines.append(f"cvta.to.global.u64 %{name}, %{name};")
    for name in maps:
        lines.append(f".reg .b64 %{name};")
        lines.append(f"mov.b64 %{name}, p_{name};")
        lines.append(f"cvta.param.u64 %{name}, %{name};")
    return "\n".join([*lines, *body, "ret;", "}", ""])


def shared_array(size: int, align: int = 1024) -> str:
    """Declarations of the shared array ``smem`` and of four mbarriers at ``bars``."""
    return f".shared .align {align} .b8 smem[{size}];\n.shared .align 8 .b64 bars[4];"


# Registers of every hand-written body; %tid and %cta are x indices, %main is true in thread 0.
PROLOGUE = """\
.reg .b16 %h<16>;
.reg .b32 %r<64>;
.reg .b64 %d<32>;
.reg .pred %p<16>, %main, %done;
.reg .b32 %tid_x, %cta_x, %base, %bar, %loop, %step;
.reg .b64 %at;
mov.u32 %tid_x, %tid.x;
mov.u32 %cta_x, %ctaid.x;
setp.eq.u32 %main, %tid_x, 0;
mov.u32 %base, smem;
mov.u32 %bar, bars;"""


def fill(size: int, threads: int, word: int = 0xA5A5A5A5) -> str:
    """PTX that fills ``smem`` with one word; every thread writes its share."""
    steps = -(-size // (16 * threads))
    lines = [f"mad.lo.u32 %step, %tid_x, 16, %base; mov.u32 %loop, {word};"]
    for step in range(steps):
        offset = step * 16 * threads
        store = f"@%done st.shared.v4.b32 [%step+{offset}], {{%loop, %loop, %loop, %loop}};"
        lines.append(_guarded(offset, size, store))
    return "\n".join(lines)


def _guarded(offset: int, size: int, text: str) -> str:
    """PTX that runs ``text`` in threads whose 16 bytes are below ``size``, by ``%done``."""
    return f"setp.lt.u32 %done, %tid_x, {(size - offset) // 16}; {text}"


def upload(size: int, threads: int, source: str) -> str:
    """PTX that copies ``size`` bytes from the global address in ``source`` to ``smem``."""
    return _copy(size, threads, source, "ld.global", "st.shared", to_shared=True)


def dump(size: int, threads: int, target: str) -> str:
    """PTX that copies ``size`` bytes of ``smem`` to the global address in ``target``."""
    return _copy(size, threads, target, "ld.shared", "st.global", to_shared=False)


def _copy(size: int, threads: int, outer: str, load: str, store: str, *, to_shared: bool) -> str:
    lines = [
        "{ .reg .b32 %w<4>;",
        f"mad.lo.u32 %step, %tid_x, 16, %base; mad.wide.u32 %at, %tid_x, 16, {outer};",
    ]
    for offset in range(0, size, 16 * threads):
        near, far = ("%at", "%step") if to_shared else ("%step", "%at")
        lines.append(
            _guarded(
                offset, size, f"@%done {load}.v4.b32 {{%w0, %w1, %w2, %w3}}, [{near}+{offset}];"
            )
        )
        lines.append(f"@%done {store}.v4.b32 [{far}+{offset}], {{%w0, %w1, %w2, %w3}};")
    return "\n".join([*lines, "}"])


def wait(barrier: str, parity: str | int, label: str) -> str:
    """PTX that waits for a phase of an mbarrier, and traps after a time instead of hanging."""
    return f"""\
mov.u32 %loop, 0;
{label}:
mbarrier.try_wait.parity.shared::cta.b64 %done, [{barrier}], {parity};
@%done bra {label}_done;
add.u32 %loop, %loop, 1;
setp.gt.u32 %done, %loop, 4000;
@%done trap;
bra {label};
{label}_done:"""
