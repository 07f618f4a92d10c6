"""Calls of vprintf and __assertfail, as compilers emit them."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.emulator import Gpu
from tests.emulator.findings import IllegalInstruction, KernelAssertion, UnknownInstruction
from tests.emulator.instructions.call import formatted
from tests.test_emulator.assemble import assemble, global_array, run

_HEAD = """\
.extern .func (.param .b32 func_retval0) vprintf (.param .b64 a, .param .b64 b);
.extern .func __assertfail (.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d,
    .param .b64 e) .noreturn;
"""
# The first argument is the thread's index, the second twice the index, as a double.
_PRINT = """
    .local .align 8 .b8 depot[16];
    st.local.b32 [depot], %r90;
    cvt.rn.f64.u32 %fd1, %r90;
    add.f64 %fd1, %fd1, %fd1;
    st.local.f64 [depot+8], %fd1;
    mov.b64 %rd1, depot;
    cvta.local.u64 %rd2, %rd1;
    mov.b64 %rd3, text;
    cvta.global.u64 %rd4, %rd3;
    {
    .param .b64 param0;
    .param .b64 param1;
    .param .b32 retval0;
    st.param.b64 [param1], %rd2;
    st.param.b64 [param0], %rd4;
    call.uni (retval0), vprintf, (param0, param1);
    ld.param.b32 %r1, [retval0];
    }
"""
_STORE = "mad.wide.u32 %rd5, %r90, 4, %rd90; st.global.b32 [%rd5], %r1;"


def text(name: str, value: str) -> str:
    values = [*value.encode(), 0]
    return f".global .align 1 .b8 {name}[{len(values)}] = {{{', '.join(map(str, values))}}};\n"


def launch(body: str, strings: dict[str, str], out: np.ndarray | None = None) -> None:
    gpu = Gpu()
    arrays = [] if out is None else [out]
    for array in arrays:
        gpu.memory.register_array(array.view(np.uint8))
    head, rest = assemble(body, len(arrays)).split(".visible")
    ptx = head + _HEAD + "".join(text(*item) for item in strings.items()) + ".visible" + rest
    parameters = [struct.pack("<Q", a.ctypes.data) for a in arrays]
    gpu.launch(gpu.load(ptx), "k", (1, 1, 1), (32, 1, 1), parameters=parameters)


def test_every_lane_prints_its_own_arguments(capsys: Any) -> None:
    out = global_array(np.zeros(32, np.uint32))
    launch(_PRINT + _STORE, {"text": "thread %d: %.2f\n"}, out)
    expected = [f"thread {t}: {2 * t}.00" for t in range(32)]
    assert capsys.readouterr().out.splitlines() == expected
    assert out.tolist() == [2] * 32  # vprintf returns the number of its arguments


def test_lanes_that_are_away_do_not_print(capsys: Any) -> None:
    body = "setp.ne.u32 %p1, %r90, 5; @%p1 bra AWAY;" + _PRINT + "AWAY:"
    launch(body, {"text": "%i%%"})
    assert capsys.readouterr().out == "5%"


def test_failed_assertion_tells_what_and_where() -> None:
    parameters = "".join(
        f".param .b{bits} param{n}; st.param.b{bits} [param{n}], {value};"
        for n, (bits, value) in enumerate(
            [(64, "%rd1"), (64, "%rd2"), (32, "71"), (64, "%rd3"), (64, "1")]
        )
    )
    body = f"""
        setp.ne.u32 %p1, %r90, 9;
        @%p1 exit;
        mov.b64 %rd1, what; mov.b64 %rd2, file; mov.b64 %rd3, name;
        {{ {parameters} call.uni __assertfail, (param0, param1, param2, param3, param4); }}
    """
    strings = {"what": "n < 9", "file": "gemm.py", "name": "kernel"}
    with pytest.raises(KernelAssertion, match=r"n < 9 failed in kernel \(gemm.py:71\), lane 9 of"):
        launch(body, strings)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{ call.uni other, (); }", "function other; .*vprintf"),
        ("{ .param .b64 p0; call.uni vprintf, (p0); }", "numbers of results and arguments"),
        ("{ .param .align 8 .b8 p0[16]; }", "call parameter p0 of 16 bytes"),
        ("{ .param .b64 q0; st.param.b32 [q0+4], %r90; }", "of a part of call parameter q0"),
        ("{ .param .b64 q0; st.param.b32 [q0], %r90; }", "of a part of call parameter q0"),
        ("{ .param .b64 q0; st.param.b64 [q0+8], %rd1; }", "of a part of call parameter q0"),
        ("{ call (q), %rd1, (q), prototype_0; }", "call of %rd1 through a pointer"),
    ],
)
def test_other_calls_are_refused(body: str, message: str) -> None:
    with pytest.raises(UnknownInstruction, match=message):
        run(body)


def _arguments(*values: Any) -> Callable[[int], bytes]:
    queue = list(values)

    def take(nbytes: int) -> bytes:
        value = queue.pop(0)
        data = struct.pack("<d", value) if isinstance(value, float) else None
        data = data or (value & (1 << 8 * nbytes) - 1).to_bytes(nbytes, "little")
        assert len(data) == nbytes
        return data

    return take


@pytest.mark.parametrize(
    ("form", "values", "expected"),
    [
        ("no conversions", (), "no conversions"),
        ("%d %i", (-3, 7), "-3 7"),
        ("%u %x %X %o", (-1, 255, 255, 8), "4294967295 ff FF 10"),
        ("%5d|%-5d|%05d|%+d", (42, 42, 42, 42), "   42|42   |00042|+42"),
        ("%#x %#o %#x", (255, 8, 0), "0xff 010 0"),
        ("%lld %llu %lx", (-(2**40), 2**63, 2**40), f"{-(2**40)} {2**63} 10000000000"),
        ("%hd %hhu", (70000, 300), "4464 44"),
        ("%f %.3f %8.2f %e", (1.5, 2.0, 3.14159, 1e10), "1.500000 2.000     3.14 1.000000e+10"),
        ("%g %G %a", (0.0001, 1e20, 1.0), "0.0001 1E+20 0x1p+0"),
        ("%f %f", (float("inf"), float("-inf")), "inf -inf"),
        ("%*d %.*f", (6, 42, 1, 2.25), "    42 2.2"),
        ("%c%c %s!", (72, 105, 99), "Hi at 99!"),
        ("%p 100%%", (0xAB00,), "0xab00 100%"),
    ],
)
def test_conversions(form: str, values: tuple[Any, ...], expected: str) -> None:
    assert formatted(form, _arguments(*values), lambda address: f"at {address}") == expected


def test_unknown_conversion() -> None:
    with pytest.raises(IllegalInstruction, match=r"printf format '%y': not a conversion"):
        formatted("a %y", _arguments(), str)
