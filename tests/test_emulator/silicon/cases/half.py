"""f16 and bf16 arithmetic, scalar and packed in pairs."""

from collections.abc import Iterator

from tests.test_emulator.silicon.case import Case, Tolerance
from tests.test_emulator.silicon.cases.banks import FLOAT_LANES
from tests.test_emulator.silicon.cases.instructions import Op, groups


def _arithmetic(kind: str) -> Iterator[Op]:
    width = "32" if kind.endswith("x2") else "16"
    # ftz and sat exist for f16 only (PTX ISA, half precision floating-point instructions).
    half = kind.startswith("f16")
    for ftz in ("", ".ftz") if half else ("",):
        for sat in ("", ".sat") if half else ("",):
            for name in ("add", "sub", "mul"):
                for rounding in ("", ".rn"):
                    yield Op(f"{name}{rounding}{ftz}{sat}.{kind}", width, f"{kind} {kind}")
            yield Op(f"fma.rn{ftz}{sat}.{kind}", width, f"{kind} {kind} {kind}")
        yield Op(f"fma.rn{ftz}.relu.{kind}", width, f"{kind} {kind} {kind}")
        for name in ("min", "max"):
            for nan in ("", ".NaN"):
                for sign in ("", ".xorsign.abs"):
                    yield Op(f"{name}{ftz}{nan}{sign}.{kind}", width, f"{kind} {kind}")
        for name in ("abs", "neg"):
            # NaN becomes 0x7fff on Hopper; PTX leaves the payload open.
            free = Tolerance(kind.removesuffix("x2"))
            yield Op(f"{name}{ftz}.{kind}", width, kind, tolerance=free)
    # 0x7ff7 in a or b, the fill value of tensor copies, makes the result 0; other NaN do not.
    for relu in ("", ".relu"):
        yield Op(f"fma.rn.oob{relu}.{kind}", width, f"{kind} {kind} {kind}")


def _approximate() -> Iterator[Op]:
    for kind, width in (("f16", "16"), ("f16x2", "32")):
        # Relative error 2^-9.9 (ex2) and absolute error 2^-10.987 (tanh), PTX ISA.
        yield Op(f"ex2.approx.{kind}", width, kind, tolerance=Tolerance("f16", 1))
        yield Op(f"tanh.approx.{kind}", width, kind, tolerance=Tolerance("f16", 1, 2.0**-10.9))
    for kind, width in (("bf16", "16"), ("bf16x2", "32")):
        yield Op(f"ex2.approx.ftz.{kind}", width, kind, tolerance=Tolerance("bf16", 1))
        yield Op(f"tanh.approx.{kind}", width, kind, tolerance=Tolerance("bf16", 1))


def cases() -> Iterator[Case]:
    for kind in ("f16", "f16x2", "bf16", "bf16x2"):
        yield from groups(kind, _arithmetic(kind), FLOAT_LANES)
    yield from groups("approximate", _approximate(), FLOAT_LANES)
