"""Cases and timings of the ops that write E4M3 rows, on sm_90."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import nvfp4_kernels
from nvfp4_kernels.formats.fp8_rows import from_rows
from nvfp4_kernels.formats.output import Fp8Output, PerTokenFp8, StaticFp8
from nvfp4_kernels.tool.product_case import compare_exact
from nvfp4_kernels.tool.quantize_case import (
    MOST_DIFFERING,
    REFERENCES,
    QuantizeCase,
    moved,
)
from nvfp4_kernels.tool.task import Figures, Machine, Mismatch
from nvfp4_kernels.tool.timed import cold_sets

SCALE = 0.0125
# One step, and the step in which a row's scale may differ, an ulp of the largest element.
MOST_STEPS = 1.5
MANTISSA_BITS, LEAST_EXPONENT = 3, -6  # of E4M3


@dataclass(frozen=True)
class Fp8RowsCase:
    """Op that quantises random values to E4M3, compared with the CPU reference.

    Attributes:
        op: name of the op.
        per_token: whether each row has its own scale.
        m, k: rows, and elements of a row of the result.
        dtype: dtype of the input.
    """

    op: str
    per_token: bool
    m: int
    k: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def section(self) -> str:
        return "correctness"

    @property
    def name(self) -> str:
        dtype, scale = str(self.dtype).removeprefix("torch."), ", per token" * self.per_token
        return f"{self.op} to E4M3{scale}, {self.m}×{self.k}, {dtype}"

    def run(self, machine: Machine) -> Figures:
        arguments = QuantizeCase(self.op, self.per_token, self.m, self.k, self.dtype).arguments()
        actual = _call(self.op, moved(arguments, machine.device), self.output(machine.device))
        expected = REFERENCES[self.op](*arguments, self.output(torch.device("cpu")))
        if self.op == "quantize":
            for got, wanted in zip(actual, expected, strict=True):
                compare_exact(_bits(got), _bits(wanted))
            return {"values": float(self.m * self.k)}
        return self._compare(actual, list(expected))

    def output(self, device: torch.device) -> Fp8Output:
        """Format of the result."""
        return PerTokenFp8() if self.per_token else StaticFp8(torch.tensor(SCALE, device=device))

    def _compare(self, actual: list[Tensor], expected: list[Tensor]) -> Figures:
        if self.op.startswith("add"):
            compare_exact(actual[-1], expected[-1])
        differing = float((_bits(actual[0]) != _bits(expected[0])).double().mean())
        if differing > MOST_DIFFERING:
            raise Mismatch(
                f"{differing:.1%} of the bytes differ, may be {MOST_DIFFERING:.0%} at the most"
            )
        got, wanted = (from_rows(each[0], self.k).double() for each in (actual, expected))
        exponent = wanted.abs().clamp(min=2.0**LEAST_EXPONENT).log2().floor()
        if self.per_token:
            got *= (actual[1].double() / expected[1].double()).unsqueeze(-1)
        steps = float(((got - wanted).abs() / (exponent - MANTISSA_BITS).exp2()).max())
        if not steps <= MOST_STEPS:
            raise Mismatch(f"a value is {steps:.1f} steps off, may be {MOST_STEPS} at the most")
        return {"values": float(self.m * self.k), "differing": differing, "steps": steps}


@dataclass(frozen=True)
class TimedFp8Rows:
    """Timing of an op that quantises ``m`` rows to E4M3, ``k`` elements each, from bfloat16."""

    section: str
    op: str
    per_token: bool
    m: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.op} to E4M3{', per token' * self.per_token}, {self.m}×{self.k}"

    def run(self, machine: Machine) -> Figures:
        case = Fp8RowsCase(self.op, self.per_token, self.m, self.k)
        inputs = QuantizeCase(self.op, self.per_token, self.m, self.k).arguments()
        read = sum(each.nbytes for each in inputs if isinstance(each, Tensor))
        residual = 2 * self.m * self.k * self.op.startswith("add")
        nbytes = read + self.m * self.k + residual
        calls: list[Callable[[], object]] = []
        for _ in range(cold_sets(nbytes, machine.l2_bytes())):
            given, output = moved(inputs, machine.device), case.output(machine.device)
            calls.append(lambda given=given, output=output: _call(self.op, given, output))  # type: ignore[misc]
        seconds = machine.seconds(calls)
        return {"us": 1e6 * seconds, "tb_per_s": nbytes / seconds / 1e12}


def _call(op: str, arguments: list[Tensor | float], output: Fp8Output) -> list[Tensor]:
    found = getattr(nvfp4_kernels, op)(*arguments, output)
    return [found] if isinstance(found, Tensor) else list(found)


def _bits(x: Tensor) -> Tensor:
    return (x.view(torch.uint8) if x.element_size() == 1 else x).cpu()
