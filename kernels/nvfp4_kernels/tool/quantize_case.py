"""Cases of the quantising ops, compared bit by bit if no approximation precedes quantisation."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

import nvfp4_kernels
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE, decode_blocks, from_blocked
from nvfp4_kernels.formats.output import PerToken, Static
from nvfp4_kernels.quantize import reference
from nvfp4_kernels.quantize.call import QuantizeCall, RmsNormQuantizeCall, SiluMulQuantizeCall
from nvfp4_kernels.quantize.rms_norm import reference as norms
from nvfp4_kernels.quantize.silu_mul import reference as activations
from nvfp4_kernels.tool.product_case import compare_exact
from nvfp4_kernels.tool.task import Figures, Machine, Mismatch

OPS = ("quantize", "rms_norm_quantize", "add_rms_norm_quantize", "silu_mul_quantize")
FORMS = tuple(product(OPS, (False, True)))
# An approximate reciprocal or root may change the rounding of a value before quantisation, and so
# its code, or the whole block's scale.
MOST_DIFFERING = 0.02
SCALE = 0.002
MOST_STEPS = 3.0
REFERENCES: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "quantize": lambda x, *of: reference.quantize(QuantizeCall(x, *of)),
    "rms_norm_quantize": lambda x, *rest: norms.rms_norm_quantize(
        RmsNormQuantizeCall(x, None, *rest)
    ),
    "add_rms_norm_quantize": lambda *given: norms.rms_norm_quantize(RmsNormQuantizeCall(*given)),
    "silu_mul_quantize": lambda x, *of: activations.silu_mul_quantize(SiluMulQuantizeCall(x, *of)),
}


@dataclass(frozen=True)
class QuantizeCase:
    """Quantising op on random values, compared with the CPU reference.

    Attributes:
        op: name of the op.
        per_token: whether each row has its own global scale.
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
        return f"{self.op}{scale}, {self.m}×{self.k}, {dtype}"

    def run(self, machine: Machine) -> Figures:
        arguments, scale = self.arguments(), torch.tensor(SCALE)
        given = moved(arguments, machine.device)
        output = PerToken() if self.per_token else Static(scale.to(machine.device))
        actual = [t.cpu() for t in getattr(nvfp4_kernels, self.op)(*given, output)]
        on_cpu = PerToken() if self.per_token else Static(scale)
        expected = REFERENCES[self.op](*arguments, on_cpu)
        if self.op == "quantize":
            for got, wanted in zip(actual, expected, strict=True):
                compare_exact(_bits(got), _bits(wanted))
            return {"values": float(self.m * self.k)}
        return self._compare(actual, list(expected))

    def arguments(self) -> list[Tensor | float]:
        """Arguments of the op except ``output``, on the CPU."""
        seeded = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=seeded).to(self.dtype)

        given: list[Tensor | float] = []
        if "rms_norm" in self.op:
            given += [random(self.m, self.k) for _ in range(1 + self.op.startswith("add"))]
            given += [(1 + torch.randn(self.k, generator=seeded) / 8).to(self.dtype), 1e-5]
        else:
            given.append(random(self.m, self.k * (2 if "silu" in self.op else 1)))
        return given

    def _compare(self, actual: list[Tensor], expected: list[Tensor]) -> Figures:
        if self.op.startswith("add"):
            compare_exact(actual[-1], expected[-1])
        differing = float((actual[0] != expected[0]).double().mean())
        if differing > MOST_DIFFERING:
            raise Mismatch(
                f"{differing:.1%} of the bytes differ, may be {MOST_DIFFERING:.0%} at the most"
            )
        values = [_values(each, self.per_token) for each in (actual, expected)]
        scales = from_blocked(expected[1], self.m, self.k // BLOCK_SIZE).double()
        step = scales.repeat_interleave(BLOCK_SIZE, -1).clamp(min=2.0**-9)
        if self.per_token:
            step *= expected[2].double().unsqueeze(-1)
        steps = float(((values[0] - values[1]).abs() / step).max())
        if not steps <= MOST_STEPS:
            raise Mismatch(f"a value is {steps:.1f} steps off, may be {MOST_STEPS:.0f} at the most")
        return {"values": float(self.m * self.k), "differing": differing, "steps": steps}


def moved(arguments: list[Tensor | float], device: torch.device) -> list[Tensor | float]:
    """Arguments with tensors moved to ``device``."""
    return [each.to(device) if isinstance(each, Tensor) else each for each in arguments]


def _values(operand: list[Tensor], per_token: bool) -> Tensor:
    values = decode_blocks(operand[0], operand[1]).double()
    return values * operand[2].double().unsqueeze(-1) if per_token else values


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x
