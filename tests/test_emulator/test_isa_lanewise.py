"""Lane-wise instructions: all forms of an instruction agree, and unknown forms are refused."""

import re
from itertools import product

import numpy as np
import pytest

from tests.emulator.findings import IllegalInstruction, UnknownInstruction
from tests.emulator.isa.lanewise import DTYPES, lookup
from tests.test_emulator.isa_oracle import (
    LANES,
    call,
    floats,
    form,
    integers,
    present,
    quiet,
    run,
    run_scalar,
)

_INT = "{u16,s16,u32,s32,u64,s64}"
_WORD = "{u32,s32,u64,s64}"
_RND = "{rn,rz,rm,rp}"
_HALF = "{f16,bf16,f16x2,bf16x2}"
_ALL_INT = "{u8,s8,u16,s16,u32,s32,u64,s64}"
_ORDER = "{eq,ne,lt,le,gt,ge}"
_FLOAT_ORDER = "{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}"
_TABLE = [
    f"{{add,sub,mul.lo,mul.hi,mad.lo,mad.hi,sad,div,rem,min,max}}.{_INT}",
    "{mul,mad}.wide.{u16,s16,u32,s32}",
    "{add.sat,sub.sat,mad.hi.sat,min.relu,max.relu,mad24.hi.sat}.s32",
    "{mul24,mad24}.{lo,hi}.{u32,s32}",
    "{abs,neg}.{s16,s32,s64}",
    "{add,min,max}.{u16x2,s16x2}",
    "{min,max}.relu.s16x2",
    f"{{add.cc,addc,addc.cc,sub.cc,subc,subc.cc,mad.lo.cc,mad.hi.cc,madc.lo,madc.hi.cc}}.{_WORD}",
    "dp4a.{u32,s32}.{u32,s32}",
    "dp2a.{lo,hi}.{u32,s32}.{u32,s32}",
    "{popc,clz,brev,bfi}.{b32,b64}",
    f"{{bfind,bfind.shiftamt,bfe}}.{_WORD}",
    "{szext.clamp,szext.wrap}.{u32,s32}",
    "{bmsk.clamp,bmsk.wrap,shf.l.clamp,shf.l.wrap,shf.r.clamp,shf.r.wrap,fns,lop3}.b32",
    "lop3.{and,or}.b32",
    "{and,or,xor,not}.{pred,b16,b32,b64}",
    "cnot.{b16,b32,b64}",
    "shl.{b16,b32,b64}",
    "shr.{b16,b32,b64,u16,s16,u32,s32,u64,s64}",
    "prmt.b32{,.f4e,.b4e,.rc8,.ecl,.ecr,.rc16}",
    f"setp.{_ORDER}{{,.and,.or,.xor}}.{_INT}",
    "setp.{lo,ls,hi,hs}.{u16,u32,u64}",
    "setp.{eq,ne}.{b16,b32,b64}",
    f"setp.{_FLOAT_ORDER}{{,.and,.or,.xor}}.{{f32,f64,f16,bf16,f16x2,bf16x2}}",
    "setp.lt.ftz.{f32,f16,f16x2}",
    f"set.{_ORDER}{{,.and}}.{{u32,s32,f32}}.{{s32,u64,f32,f64}}",
    "set.{gt,nan}.{bf16,u16,s32}.{f16,bf16}",
    "set.gt.f16.f16",
    "set.{gt,nan}{,.or}.u32.{f16x2,bf16x2}",
    "set.gt.f16x2.f16x2",
    "selp.{b16,b32,b64,u16,s16,u32,s32,u64,s64,f32,f64}",
    "slct.{b16,b32,b64,f32,f64}.{s32,f32}",
    "slct.ftz.b32.f32",
    "mov.{pred,b16,b32,b64,u16,s16,u32,s32,u64,s64,f32,f64}",
    f"{{add,sub,mul}}{{,.{_RND[1:-1].replace(',', ',.')}}}{{,.ftz}}{{,.sat}}.f32",
    f"fma.{_RND}{{,.ftz}}{{,.sat}}.f32",
    f"{{add,sub,mul,fma}}.{_RND}{{,.ftz}}.f32x2",
    f"{{add,sub,mul,div,fma,mad}}.{_RND}.f64",
    f"{{div,rcp,sqrt}}.{_RND}{{,.ftz}}.f32",
    f"{{rcp,sqrt}}.{_RND}.f64",
    "{rcp,sqrt,rsqrt,sin,cos,lg2,ex2,div}.approx{,.ftz}.f32",
    "div.full{,.ftz}.f32",
    "tanh.approx.{f32,f16,f16x2,bf16,bf16x2}",
    "ex2.approx.{f16,f16x2,ftz.bf16,ftz.bf16x2}",
    "{rcp.approx.ftz,rsqrt.approx,rsqrt.approx.ftz}.f64",
    "{min,max}{,.ftz}{,.NaN}{,.xorsign.abs}.{f32,f16,f16x2}",
    "{min,max}{,.NaN}{,.xorsign.abs}.{bf16,bf16x2}",
    "{min,max,copysign}.f64",
    "copysign.f32",
    "{abs,neg}{,.ftz}.{f32,f16,f16x2}",
    "{abs,neg}.{f64,bf16,bf16x2}",
    "testp.{finite,infinite,number,notanumber,normal,subnormal}.{f32,f64}",
    f"{{add,sub,mul}}{{,.rn}}.{_HALF}",
    "{add,sub,mul,fma}.rn{,.ftz}{,.sat}.{f16,f16x2}",
    f"fma.rn{{,.oob}}{{,.relu}}.{_HALF}",
    f"{{add,sub,fma}}.{_RND}{{,.sat}}.f32.{{f16,bf16}}",
    f"cvt.{_ALL_INT}.{_ALL_INT}",
    "cvt.sat.{u8,s8}.{s16,s32,s64,u64}",
    f"cvt.{_RND}.{{f16,f32,f64,bf16}}.{_ALL_INT}",
    f"cvt.{{rni,rzi,rmi,rpi}}.{_ALL_INT}.{{f16,f32,f64,bf16}}",
    f"cvt.{_RND}{{,.ftz}}{{,.sat}}.{{f16.f32,f32.f64}}",
    f"cvt.{_RND}.{{bf16.f32,f16.f64,bf16.f64,bf16.f16,f16.bf16}}",
    "cvt.{f32.f16,f32.bf16,f64.f16,f64.bf16,f64.f32,ftz.f32.f16,sat.f32.f32}",
    "cvt.{rni,rzi,rmi,rpi}.{f16.f16,f32.f32,f64.f64,bf16.bf16}",
    "cvt.{rn,rz}{,.relu}{,.satfinite}.{f16,bf16,f16x2,bf16x2,tf32}.f32",
    "cvt.rna{,.satfinite}.tf32.f32",
    "cvt.rs{,.relu}{,.satfinite}.{f16x2,bf16x2}.f32",
    "cvt.rn.satfinite{,.relu}.{e4m3x2,e5m2x2,e2m3x2,e3m2x2,e2m1x2}.{f32,f16x2,bf16x2}",
    "cvt.rn{,.relu}.{f16x2,bf16x2}.{e4m3x2,e5m2x2,e2m3x2,e3m2x2,e2m1x2}",
    "cvt.rs{,.relu}.satfinite.{e4m3x4,e5m2x4,e2m3x4,e3m2x4,e2m1x4}.f32",
    "cvt.{rz,rp}{,.satfinite}.ue8m0x2.{f32,bf16x2}",
    "cvt.rn.bf16x2.ue8m0x2",
    "cvt.pack.sat.{u16,s16}.s32",
    "cvt.pack.sat.{u8,s8,u4,s4,u2,s2}.s32.b32",
]


def _expanded(pattern: str) -> list[str]:
    """List every opcode of a pattern with {alternatives}."""
    pieces = re.split(r"\{([^}]*)\}", pattern)
    choices = [piece.split(",") if place % 2 else [piece] for place, piece in enumerate(pieces)]
    return ["".join(parts) for parts in product(*choices)]


_OPCODES = sorted({opcode for pattern in _TABLE for opcode in _expanded(pattern)})


def _results(opcode: str) -> int | None:
    return 2 if opcode.startswith("setp") and opcode.endswith("x2") else None


def _source(name: str, seed: int, opcode: str, place: int) -> np.ndarray:
    """Raw bit patterns for one source, within the instruction's range."""
    if name == "pred":
        return integers(16, seed, LANES) & 1
    bits = np.dtype(DTYPES[name]).itemsize * 8
    if name in ("f16", "f32", "f64"):
        return floats(name, seed, LANES)
    values = integers(bits, seed, LANES)
    if opcode.startswith("fns") and place == 1:
        return values & 31
    return values


def _sources(opcode: str) -> list[np.ndarray]:
    names = form(opcode, results=_results(opcode)).sources
    sources = [_source(n, 10 + i, opcode, i) for i, n in enumerate(names)]
    if opcode.startswith("lop3"):
        sources[3] = np.array([0xD8], np.uint32)
    return sources


def _same(first: object, second: object) -> bool:
    if isinstance(first, tuple) and isinstance(second, tuple):
        return all(_same(a, b) for a, b in zip(first, second, strict=True))
    a, b = np.asarray(first), np.asarray(second)
    if a.size == 1:
        a = a.reshape(1)
    return a.dtype == b.dtype and bool(np.array_equal(a, b))


@pytest.mark.parametrize("pattern", _TABLE)
def test_forms_agree(pattern: str) -> None:
    """Uniform operands, single lanes and the scalar form give the results of full arrays."""
    for opcode in _expanded(pattern):
        results = _results(opcode)
        sources = _sources(opcode)
        whole = run(opcode, *sources, results=results)
        first = [s[:1].copy() for s in sources]
        lane = run(opcode, *first, results=results)
        lead = tuple(w[:1] for w in whole) if isinstance(whole, tuple) else whole[:1]
        assert _same(lane, lead), opcode
        numbers = [bool(s[0]) if n == "pred" else int(s[0]) for s, n in
                   zip(sources, form(opcode, results=results).sources, strict=True)]  # fmt: skip
        plain = run_scalar(opcode, *numbers, results=results)
        if plain is not None:
            found = tuple(int(r[0]) for r in lane) if isinstance(lane, tuple) else int(lane[0])
            assert plain == found, (opcode, numbers)
            assert isinstance(plain, bool) == (lane.dtype == bool), opcode
        if opcode.startswith("lop3"):
            continue
        for varying in range(len(sources) if len(sources) > 1 else 0):
            mixed = [
                s if i == varying else n
                for i, (s, n) in enumerate(zip(sources, numbers, strict=True))
            ]
            spread = [s if i == varying else np.full(LANES, s[0]) for i, s in enumerate(sources)]
            expected = run(opcode, *spread, results=results)
            assert _same(run(opcode, *mixed, results=results), expected), (opcode, varying)
            constant = [
                n if i == varying else s
                for i, (s, n) in enumerate(zip(sources, numbers, strict=True))
            ]
            spread = [np.full(LANES, s[0]) if i == varying else s for i, s in enumerate(sources)]
            expected = run(opcode, *spread, results=results)
            assert _same(run(opcode, *constant, results=results), expected), (opcode, varying)


def test_the_table_is_large() -> None:
    assert len(_OPCODES) > 1500


def test_scalar_forms_of_the_hot_integer_instructions() -> None:
    for opcode in (
        "add.s32", "sub.s32", "mul.lo.s32", "mad.lo.s32", "mul.wide.u32", "mad.wide.s32", "shl.b32",
        "shr.u32", "shr.s32", "and.b32", "or.b64", "xor.b32", "not.pred", "setp.lt.s32", "selp.b32",
        "setp.ge.and.u32", "div.u32", "rem.u32", "min.s32", "cvt.u64.u32", "cvt.s64.s32", "mov.b32",
        "popc.b32", "clz.b32", "bfe.u32",
    ):  # fmt: skip
        assert form(opcode).scalar is not None, opcode


def test_conditions_codes_are_marked() -> None:
    assert (form("add.cc.u32").carry_in, form("add.cc.u32").carry_out) == (False, True)
    assert (form("addc.cc.u32").carry_in, form("addc.cc.u32").carry_out) == (True, True)
    assert (form("madc.hi.u64").carry_in, form("madc.hi.u64").carry_out) == (True, False)
    assert not form("add.u32").carry_out


def test_negated_predicates_come_negated() -> None:
    """The code generator writes ``!p`` as ``~p`` for lanes and ``not p`` for a bool."""
    semantics = form("setp.lt.and.s32")
    a, b = integers(32, 1, LANES), integers(32, 2, LANES)
    p = integers(16, 3, LANES) & 1
    with quiet():
        found = call(semantics, [present(a, "s32"), present(b, "s32"), ~present(p, "pred")])
    assert np.array_equal(found, run("setp.lt.and.s32", a, b, 1 - p))


@pytest.mark.parametrize(
    "opcode", ["ld.global.b32", "bar.sync", "shfl.sync.idx.b32", "tcgen05.mma", "bra", "vote.sync"]
)
def test_other_families_are_not_lane_wise(opcode: str) -> None:
    assert lookup(opcode) is None


@pytest.mark.parametrize(
    ("opcode", "message"),
    [
        ("add.sat.u32", r"add\.sat\.u32: \.sat is not modelled"),
        ("add.fancy.s32", r"\.fancy is not modelled"),
        ("add.rn.s32", r"\.rn is not modelled"),
        ("sub.u16x2", r"\.u16x2 is not modelled"),
        ("mul.wide.s64", r"\.s64 is not modelled"),
        ("mul.s32", r"needs one of \.lo \.hi \.wide"),
        ("add.cc.u16", r"\.u16 is not modelled"),
        ("fma.f32", r"needs one of \.rn \.rz \.rm \.rp"),
        ("fma.rn.s32", r"type \.s32, expected \.f32 \.f32x2 \.f64"),
        ("add.ftz.f64", r"\.ftz is not modelled"),
        ("mul.rn.sat.bf16x2", r"\.sat is not modelled"),
        ("max.abs.f32", r"\.abs is not modelled"),
        ("tanh.approx.ftz.f32", r"\.ftz is not modelled"),
        ("ex2.approx.bf16", r"needs one of \.ftz"),
        ("setp.lo.s32", r"needs one of \.eq \.ne \.lt"),
        ("setp.s32", r"needs one of \.eq"),
        ("shl.s32", r"type \.s32, expected \.b16 \.b32 \.b64"),
        ("shf.l.b32", r"needs one of \.clamp \.wrap"),
        ("cvt.f16.f32", r"needs one of \.rn \.rz \.rm \.rp"),
        ("cvt.s32.f32", r"needs one of \.rni \.rzi \.rmi \.rpi"),
        ("cvt.sat.u32.u16", r"\.sat is not modelled"),
        ("cvt.rn.e4m3x2.f32", r"needs one of \.satfinite"),
        ("cvt.rz.satfinite.e2m1x2.f32", r"needs one of \.rn"),
        ("cvt.rna.relu.tf32.f32", r"\.relu is not modelled"),
        ("cvt.rn.satfinite.e4m3x2.e5m2x2", r"\.e4m3x2\.e5m2x2 is not modelled"),
        ("cvt.rn.satfinite.s2f6x2.f32", r"type \.s2f6x2, expected"),
        ("add", r"type nothing, expected"),
    ],
)
def test_unknown_forms_are_refused(opcode: str, message: str) -> None:
    with pytest.raises(UnknownInstruction, match=message):
        lookup(opcode)


@pytest.mark.parametrize(
    ("opcode", "sources", "results", "message"),
    [
        ("add.s32", 3, None, r"add\.s32: 3 source operands, expected 2"),
        ("max.s32", 3, None, r"3 source operands, expected 2"),
        ("max.f32", 4, None, r"4 source operands, expected 2 or 3"),
        ("setp.lt.s32", 3, None, r"3 source operands, expected 2"),
        ("setp.lt.and.s32", 2, 1, r"2 source operands, expected 3"),
        ("setp.lt.f16x2", 2, 1, r"1 destination operands, expected 2"),
        ("lop3.b32", 4, 2, r"2 destination operands, expected 1"),
        ("cvt.rs.satfinite.e2m1x4.f32", 2, None, r"2 source operands, expected 5"),
    ],
)
def test_operand_counts(opcode: str, sources: int, results: int | None, message: str) -> None:
    with pytest.raises(IllegalInstruction, match=message):
        lookup(opcode, sources, results)
