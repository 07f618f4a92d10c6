"""Cases of GEMMs: exact on grid values, within a derived error bound on random values."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nvfp4_kernels import Static, gemm, gemv, silu_mul_gemm
from nvfp4_kernels.devices import dtype_name
from nvfp4_kernels.quantize.call import QuantizeCall
from nvfp4_kernels.quantize.reference import quantize as quantize_reference
from nvfp4_kernels.tool.operands import Operand, grid_operand, positive_operand, random_operand
from nvfp4_kernels.tool.task import Figures, Machine, Mismatch

# Unit roundoff: half the distance from 1 to the next value.
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
Op = Literal["gemm", "gemv", "silu_mul_gemm"]


@dataclass(frozen=True)
class ProductCase:
    """GEMM, plain or of gate and up, on grid values or random values.

    Attributes:
        op: name of the op.
        m, n, k: sizes.
        batch: number of matrices, each with its own weight; 0: no batch dimension.
        exact: whether to use grid values and compare bit by bit; else random values and a bound.
        shards: shards of the weight, each with its own alpha.
        row_scale, bias: whether the op gets a row scale and a bias.
        out_dtype: dtype of the result.
        quantized: whether the result of gate and up is NVFP4, which must equal the quantised
            float32 result.
    """

    op: Op
    m: int
    n: int
    k: int
    batch: int = 0
    exact: bool = True
    shards: int = 1
    row_scale: bool = False
    bias: bool = False
    out_dtype: torch.dtype = torch.bfloat16
    quantized: bool = False

    @property
    def section(self) -> str:
        return "correctness"

    @property
    def name(self) -> str:
        sizes = [self.m, self.n, self.k, *([self.batch] if self.batch else [])]
        words = [self.op, "×".join(map(str, sizes))]
        words += [f"{self.shards} shards"] * (self.shards > 1)
        words += ["row scale"] * self.row_scale + ["bias"] * self.bias
        words.append("NVFP4" if self.quantized else dtype_name(self.out_dtype))
        words.append("exact" if self.exact else "random")
        return ", ".join(words)

    def run(self, machine: Machine) -> Figures:
        seeded = torch.Generator(machine.device).manual_seed(0)
        return self._product(seeded) if self.op in ("gemm", "gemv") else self._pair(seeded)

    def _shape(self, rows: int) -> tuple[int, ...]:
        return (*([self.batch] if self.batch else []), rows, self.k)

    def _row_scale(self, seeded: torch.Generator) -> Tensor | None:
        if not self.row_scale:
            return None
        random = torch.rand(self._shape(self.m)[:-1], generator=seeded, device=seeded.device)
        return 2.0 ** (random.round() - 1) if self.exact else 0.3 + random

    def _product(self, seeded: torch.Generator) -> Figures:
        device = seeded.device
        make = grid_operand if self.exact else random_operand
        a, b = (make(self._shape(rows), seeded) for rows in (self.m, self.n))
        sizes = [self.n // self.shards] * self.shards
        sizes[-1] += self.n - sum(sizes)
        alpha = 2.0 ** -(6.0 + torch.arange(self.shards, device=device))
        if not self.exact:
            alpha *= 0.7
        rows, bias = self._row_scale(seeded), None
        if self.bias:
            bias = torch.randint(-8, 9, (self.n,), generator=seeded, device=device)
            bias = bias.to(self.out_dtype)
        actual = (gemm if self.op == "gemm" else gemv)(
            a.data, a.scales, b.data, b.scales, alpha, sizes,
            row_scale=rows, bias=bias, out_dtype=self.out_dtype,
        )  # fmt: skip
        columns = alpha.double().repeat_interleave(torch.tensor(sizes, device=device))
        factor = columns * (1.0 if rows is None else rows.double()[..., None])
        added = torch.zeros(self.n, device=device) if bias is None else bias
        expected = a.values @ b.values.mT * factor + added.double()
        if self.exact:
            return compare_exact(actual, expected.to(self.out_dtype))
        # K exact products, and three factors and terms, each rounded once to float32.
        magnitude = a.values.abs() @ b.values.abs().mT * factor.abs() + added.double().abs()
        accumulation = (self.k + 3) * ROUNDOFF[torch.float32] * magnitude
        return compare_bound(actual, expected, accumulation)

    def _pair(self, seeded: torch.Generator) -> Figures:
        a_shape, b_shape, device = self._shape(self.m), self._shape(self.n), seeded.device
        if self.exact:
            a, gate = (positive_operand(shape, seeded) for shape in (a_shape, b_shape))
            up = grid_operand(b_shape, seeded)
            # Gates of at least 64 times a row scale of at least half: silu is the identity there.
            alpha = torch.tensor([2.0 ** (6 - (self.k.bit_length() - 1)), 0.25], device=device)
        else:
            a, gate, up = (random_operand(shape, seeded) for shape in (a_shape, b_shape, b_shape))
            # 47: root mean square of such operands.
            alpha = torch.tensor([1.3, 1.7], device=device) / (self.k**0.5 * 47 * 47)
        rows = self._row_scale(seeded)
        operands = (a.data, a.scales, gate.data, gate.scales, up.data, up.scales, alpha)
        if self.quantized:
            return _compare_quantized(operands, rows)
        actual = silu_mul_gemm(*operands, row_scale=rows, out_dtype=self.out_dtype)
        return _compare_pair(self, actual, a, gate, up, alpha, rows)


def _compare_pair(
    case: ProductCase,
    actual: Tensor,
    a: Operand,
    gate: Operand,
    up: Operand,
    alpha: Tensor,
    rows: Tensor | None,
) -> Figures:
    row = 1.0 if rows is None else rows.double()[..., None]
    gates = a.values @ gate.values.mT * alpha[0].double() * row
    ups = a.values @ up.values.mT * alpha[1].double() * row
    if case.exact:
        return compare_exact(actual, (gates * ups).float().to(case.out_dtype))
    silu = gates * torch.sigmoid(gates)
    expected = silu * ups
    # Sums as in a product; silu's slope is at most 1.1, and its float32 steps at most eight.
    accumulation = (case.k + 2) * ROUNDOFF[torch.float32]
    gate_error, up_error = (
        accumulation * factor * (a.values.abs() @ weight.values.abs().mT) * alpha[i].double() * row
        for i, (factor, weight) in enumerate(((1.1, gate), (1.0, up)))
    )
    bound = gate_error * ups.abs() + silu.abs() * up_error + gate_error * up_error
    return compare_bound(actual, expected, bound + 8 * ROUNDOFF[torch.float32] * expected.abs())


def _compare_quantized(operands: tuple[Any, ...], rows: Tensor | None) -> Figures:
    """Compare the NVFP4 result with the float32 result quantised afterwards."""
    full = silu_mul_gemm(*operands, row_scale=rows, out_dtype=torch.float32)
    scale = (full.abs().amax() / 2688).float()
    data, scales = silu_mul_gemm(*operands, row_scale=rows, output=Static(scale))
    expected_data, expected_scales = quantize_reference(
        QuantizeCall(full.cpu(), Static(scale.cpu()))
    )
    compare_exact(scales.cpu().view(torch.uint8), expected_scales.view(torch.uint8))
    return compare_exact(data.cpu(), expected_data)


def compare_exact(actual: Tensor, expected: Tensor) -> Figures:
    """Compare bit by bit, except for the sign of zero.

    Raises:
        Mismatch: elements differ; the message gives their number and the first position.
    """
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise Mismatch(
            f"result is {actual.dtype} {tuple(actual.shape)}, must be {expected.dtype} "
            f"{tuple(expected.shape)}"
        )
    wrong = actual != expected
    _refuse(wrong, actual, expected)
    return {"values": float(actual.numel())}


def compare_bound(actual: Tensor, expected: Tensor, error: Tensor) -> Figures:
    """Compare within float64 ``error`` plus one rounding to ``actual``'s dtype.

    Raises:
        Mismatch: an element exceeds the bound, or is NaN.
    """
    info = torch.finfo(actual.dtype)
    bound = error + ROUNDOFF[actual.dtype] * (expected.abs() + error).clamp(min=info.tiny)
    off = (actual.double() - expected).abs()
    _refuse(~(off <= bound), actual, expected)
    worst = float((off / bound).max()) if off.numel() else 0.0
    return {"values": float(actual.numel()), "share of bound": worst}


def _refuse(wrong: Tensor, actual: Tensor, expected: Tensor) -> None:
    if wrong.any():
        first = tuple(int(i) for i in wrong.nonzero()[0])
        raise Mismatch(
            f"{int(wrong.sum())} of {wrong.numel()} values are wrong, the first at {first}: "
            f"{actual[first].item()}, must be {expected[first].item()}"
        )
