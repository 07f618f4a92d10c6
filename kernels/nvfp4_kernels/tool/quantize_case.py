"""Cases of the quantising ops, compared bit by bit if no approximation precedes quantisation."""

from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

import nvfp4_kernels
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE, decode_blocks, from_blocked
from nvfp4_kernels.tool.product_case import compare_exact
from nvfp4_kernels.tool.task import Figures, Machine, Mismatch

OPS = (
    "quantize",
    "quantize_per_token",
    "rms_norm_quantize",
    "rms_norm_quantize_per_token",
    "add_rms_norm_quantize",
    "add_rms_norm_quantize_per_token",
    "silu_mul_quantize",
    "silu_mul_quantize_per_token",
)
# An approximate reciprocal or root may change the rounding of a value before quantisation, and so
# its code, or the whole block's scale.
MOST_DIFFERING = 0.02
MOST_STEPS = 3.0
_ROOMS = {
    "quantize": "quantize",
    "rms_norm_quantize": "quantize.rms_norm",
    "silu_mul_quantize": "quantize.silu_mul",
}


@dataclass(frozen=True)
class QuantizeCase:
    """One op on random values.

    Attributes:
        op: name of the op.
        m, k: rows of the result, and elements per row.
        dtype: dtype of the input.
    """

    op: str
    m: int
    k: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def _prologue(self) -> str:
        return self.op.removeprefix("add_").removesuffix("_per_token")

    @property
    def section(self) -> str:
        return "correctness"

    @property
    def name(self) -> str:
        return f"{self.op}, {self.m}×{self.k}, {str(self.dtype).removeprefix('torch.')}"

    def run(self, machine: Machine) -> Figures:
        arguments = self.arguments()
        moved = [a.to(machine.device) if isinstance(a, Tensor) else a for a in arguments]
        module = import_module(f"nvfp4_kernels.{_ROOMS[self._prologue]}.reference")
        reference = getattr(module, self.op)
        actual = [t.cpu() for t in getattr(nvfp4_kernels, self.op)(*moved)]
        expected = reference(*arguments)
        if self._prologue == "quantize":
            for got, wanted in zip(actual, expected, strict=True):
                compare_exact(_bits(got), _bits(wanted))
            return {"values": float(self.m * self.k)}
        return self._compare(actual, list(expected))

    def arguments(self) -> list[Tensor | float]:
        """Arguments of the op, on the CPU."""
        seeded = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=seeded).to(self.dtype)

        given: list[Tensor | float] = []
        if "rms_norm" in self.op:
            given += [random(self.m, self.k) for _ in range(1 + self.op.startswith("add"))]
            given += [(1 + torch.randn(self.k, generator=seeded) / 8).to(self.dtype), 1e-5]
        else:
            given.append(random(self.m, self.k * (2 if "silu" in self.op else 1)))
        if not self.op.endswith("per_token"):
            given.append(torch.tensor(0.002))
        return given

    def _compare(self, actual: list[Tensor], expected: list[Tensor]) -> Figures:
        if self.op.startswith("add"):
            compare_exact(actual[-1], expected[-1])
        differing = float((actual[0] != expected[0]).double().mean())
        if differing > MOST_DIFFERING:
            raise Mismatch(
                f"{differing:.1%} of the bytes differ, may be {MOST_DIFFERING:.0%} at the most"
            )
        values = [_values(each, self.op.endswith("per_token")) for each in (actual, expected)]
        scales = from_blocked(expected[1], self.m, self.k // BLOCK_SIZE).double()
        step = scales.repeat_interleave(BLOCK_SIZE, -1).clamp(min=2.0**-9)
        if self.op.endswith("per_token"):
            step *= expected[2].double().unsqueeze(-1)
        steps = float(((values[0] - values[1]).abs() / step).max())
        if not steps <= MOST_STEPS:
            raise Mismatch(f"a value is {steps:.1f} steps off, may be {MOST_STEPS:.0f} at the most")
        return {"values": float(self.m * self.k), "differing": differing, "steps": steps}


def _values(operand: list[Tensor], per_token: bool) -> Tensor:
    values = decode_blocks(operand[0], operand[1]).double()
    return values * operand[2].double().unsqueeze(-1) if per_token else values


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x
