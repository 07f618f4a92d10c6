"""Cases of grouped GEMMs: exact on grid values for every tile, bounded for every activation."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import nvfp4_kernels
from nvfp4_kernels.activation import GATED, SILU, UNGATED, Activation
from nvfp4_kernels.formats.output import Static
from nvfp4_kernels.formats.terms import quantize_terms
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.gemm.sm100.choose_grouped import GroupedProblem, grouped_candidates
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile
from nvfp4_kernels.moe.routing import TILE_TOKENS
from nvfp4_kernels.tool.operands import Operand, grid_operand, positive_operand, random_operand
from nvfp4_kernels.tool.product_case import ROUNDOFF, compare_bound, compare_exact
from nvfp4_kernels.tool.report import describe
from nvfp4_kernels.tool.task import Figures, Machine

COUNTS = (1, 0, 3, 2)  # tiles of each expert
SPARE = 2  # allocated tiles beyond the tiles in use
OF_NO_EXPERT = 2**30
# Bounds on activations: growth relative to the argument, relu² aside, and error in float32 steps.
SLOPE, STEPS = 1.25, 16
ROOT_MEAN_SQUARE = 47  # of random operands


class Numbers(NamedTuple):
    """Operands of a grouped GEMM, as the op takes them and in float64.

    Attributes:
        a: tokens, ``(tiles, T, K)``.
        weights: gate and up, or a single weight; each ``(experts, N, K)``.
        alpha: float32 ``(experts, weights)``.
        row_scale: float32 ``(tiles, T)``, or None.
        bias: bfloat16 ``(experts, weights, N)``, or None.
        experts: int64 ``(tiles,)``, expert of each tile in use.
    """

    a: Operand
    weights: list[Operand]
    alpha: Tensor
    row_scale: Tensor | None
    bias: Tensor | None
    experts: Tensor

    def product(self, index: int, *, magnitude: bool = False) -> Tensor:
        """Float64 GEMM of the tiles in use and weight ``index``, with alpha, row scale and bias.

        ``magnitude``: whether to use magnitudes of operands and bias, for error bounds.
        """
        a, b = self.a.values[: len(self.experts)], self.weights[index].values[self.experts]
        product = a.abs() @ b.abs().mT if magnitude else a @ b.mT
        product = product * self.alpha[self.experts, index, None, None].double()
        if self.row_scale is not None:
            product = product * self.row_scale[: len(self.experts), :, None].double()
        if self.bias is not None:
            bias = self.bias[self.experts, index, None].double()
            product = product + (bias.abs() if magnitude else bias)
        return product


@dataclass(frozen=True)
class GroupedCase:
    """Grouped GEMM: each token tile times the weights of its expert.

    Attributes:
        tile_tokens: rows of a token tile.
        n: rows of each weight.
        k: elements of each row.
        activation: activation of gate and up, or of the single product; None: no activation.
        gated: whether experts have gate and up.
        exact: whether to use grid values and compare bit by bit; else random values and a bound.
        quantized: whether the result is NVFP4, which must equal the quantised float32 result.
        row_scale: whether each token has a row scale.
        bias: whether each product has a bias.
        tile: forced tile of the kernel; None: the op chooses.
    """

    tile_tokens: int
    n: int
    k: int
    activation: Activation | None = None
    gated: bool = False
    exact: bool = True
    quantized: bool = False
    row_scale: bool = False
    bias: bool = False
    tile: Tile | None = None

    @property
    def section(self) -> str:
        """Section of the report."""
        return "correctness"

    @property
    def op(self) -> str:
        """Name of the op."""
        return "grouped_silu_mul_gemm" if self.gated else "grouped_gemm"

    @property
    def name(self) -> str:
        """Name in the report."""
        words = [self.op, f"{sum(COUNTS)}×{self.tile_tokens}×{self.n}×{self.k}"]
        if self.activation is not None:
            name, *parameters = self.activation
            words.append(" ".join([name, *(f"{p:g}" for p in parameters if p not in (None, 0, 1))]))
        words += [describe(self.tile)] if self.tile is not None else []
        words += ["row scale"] * self.row_scale + ["bias"] * self.bias
        words += ["NVFP4"] * self.quantized
        return ", ".join([*words, "exact" if self.exact else "random"])

    def run(self, machine: Machine) -> Figures:
        """Run the op and compare the token tiles in use with the reference.

        Raises:
            Mismatch: the result is wrong.
        """
        numbers = self._numbers(torch.Generator(machine.device).manual_seed(0))
        if self.quantized:
            return self._compare_quantized(numbers)
        used, products = len(numbers.experts), range(len(numbers.weights))
        out = self._launch(numbers, torch.float32 if self.exact else torch.bfloat16)[:used]
        sums = [numbers.product(index) for index in products]
        if self.exact:  # where SiLU is the identity
            return compare_exact(out, torch.stack(sums).prod(0).float())
        # K exact products, two factors and the bias, each rounded once to float32.
        step = ROUNDOFF[torch.float32]
        errors = [(self.k + 3) * step * numbers.product(i, magnitude=True) for i in products]
        return compare_bound(out, self._activated(sums), self._bound(sums, errors))

    def _activated(self, sums: list[Tensor]) -> Tensor:
        if self.activation is None:
            return sums[0]
        return self.activation.gated(*sums) if self.gated else self.activation.ungated(sums[0])

    def _bound(self, sums: list[Tensor], errors: list[Tensor]) -> Tensor:
        """Error bound of the activated result, from the products and their error bounds."""
        steps = STEPS * ROUNDOFF[torch.float32]
        if self.activation is None:
            return errors[0]
        sizes = [each.abs() for each in sums]
        if self.gated:
            up, up_error = sizes[1] + abs(self.activation.beta), errors[1]
            return SLOPE * errors[0] * (up + up_error) + sizes[0] * (up_error + steps * up)
        if self.activation.name == "relu2":
            return errors[0] * (2 * sizes[0] + errors[0]) + steps * sizes[0].square()
        return SLOPE * errors[0] + steps * sizes[0]

    def _compare_quantized(self, numbers: Numbers) -> Figures:
        """Compare the quantised result with the quantised float32 result."""
        used = len(numbers.experts)
        full = self._launch(numbers, torch.float32)[:used]
        experts = torch.arange(len(COUNTS), device=full.device)
        scale = (full.abs().amax() / 2688).float() * 2.0**experts
        data, scales = self._launch(numbers, torch.float32, Static(scale))
        figures: Figures = {}
        for index, expert in enumerate(numbers.experts.tolist()):
            wanted = quantize_terms(full[index].cpu(), scale[expert].cpu(), 1)
            compare_exact(scales[index].cpu().view(torch.uint8), wanted[1].view(torch.uint8))
            figures = compare_exact(data[index].cpu(), wanted[0])
        return figures | {"values": float(full.numel())}

    def _launch(
        self, numbers: Numbers, out_dtype: torch.dtype, output: Static | None = None
    ) -> Any:
        """Result of the op, or of its kernel with the forced tile."""
        device, used = numbers.alpha.device, len(numbers.experts)
        groups = torch.full((1 + used + SPARE,), OF_NO_EXPERT, dtype=torch.int32, device=device)
        groups[0], groups[1 : 1 + used] = used, numbers.experts
        b, b_scales = (
            torch.stack([getattr(weight, part).view(torch.uint8) for weight in numbers.weights], 1)
            for part in ("data", "scales")
        )
        alpha, b_scales, bias = numbers.alpha, b_scales.view(torch.float8_e4m3fn), numbers.bias
        if not self.gated:
            b, b_scales, alpha = b[:, 0], b_scales[:, 0], alpha[:, 0]
            bias = None if bias is None else bias[:, 0].contiguous()
        arguments = (
            numbers.a.data, numbers.a.scales, groups, b.contiguous(), b_scales.contiguous(),
            alpha.contiguous(),
        )  # fmt: skip
        if self.tile is not None:
            from nvfp4_kernels.gemm.sm100.launch_grouped import grouped_gemm

            call = GroupedGemmCall(
                *arguments, numbers.row_scale, bias, self.n, self.activation, out_dtype,
                output=output,
            )  # fmt: skip
            out, scales = grouped_gemm(call, tile=self.tile)
            return out if scales is None else (out, scales)
        given: dict[str, Any] = {"row_scale": numbers.row_scale, "activation": self.activation}
        given |= {"out_dtype": out_dtype} if output is None else {"output": output}
        return getattr(nvfp4_kernels, self.op)(*arguments, bias=bias, **given)

    def _numbers(self, seeded: torch.Generator) -> Numbers:
        device, experts = seeded.device, len(COUNTS)
        shape = (sum(COUNTS) + SPARE, self.tile_tokens, self.k)
        each, number = (experts, self.n, self.k), torch.arange(experts, device=device)
        columns = 2 if self.gated else 1
        if not self.exact:
            a, *weights = (random_operand(of, seeded) for of in (shape, *[each] * columns))
            size = self.k**0.5 * ROOT_MEAN_SQUARE**2
            alpha = (1 + torch.arange(experts * columns, device=device)) / size
        elif self.gated:
            # Gates of at least 64 times a row scale of at least half: SiLU is the identity there.
            a, gate = (positive_operand(of, seeded) for of in (shape, each))
            weights = [gate, grid_operand(each, seeded)]
            alpha = 2.0 ** torch.stack([7 - self.k.bit_length() + number, number - 2], 1)
        else:
            a, weights = grid_operand(shape, seeded), [grid_operand(each, seeded)]
            alpha = 2.0 ** (number - 6)
        rows = None
        if self.row_scale:
            random = torch.rand(shape[:2], generator=seeded, device=device)
            rows = 2.0 ** (random.round() - 1) if self.exact else 0.3 + random
        bias = None
        if self.bias:
            bias = torch.randint(-8, 9, (experts, columns, self.n), generator=seeded, device=device)
            bias[:, 0] += 64 * (self.gated and self.exact)  # gates stay as large as SiLU likes
            bias = bias.bfloat16()
        tiles = torch.repeat_interleave(number, torch.tensor(COUNTS, device=device))
        return Numbers(a, weights, alpha.float().view(experts, columns), rows, bias, tiles)


ACTIVATIONS = [
    *(Activation(name, 1.5) for name in GATED),
    *(Activation(name) for name in GATED if name != "swiglustep"),
    Activation("swigluoai_uninterleave", 7.0, 1.702, 1.0),
    Activation("situ", 25.0, 4.0),
]


def grouped_cases(quick: bool) -> list[GroupedCase]:
    """Cases of both ops: each tile (``quick``: each kind), each activation, NVFP4 results."""
    cases = [
        GroupedCase(
            tokens,
            320,
            544,
            SILU if gated else None,
            gated,
            row_scale=tokens in (16, 256),
            bias=tokens in (8, 128),
        )
        for gated in (True, False)
        for tokens in TILE_TOKENS
    ]
    tiled = [replace(case, k=2080, tile=tile) for case in cases for tile in _tiles(case)]
    kinds: dict[tuple[object, ...], GroupedCase] = {}
    for case in tiled:
        kinds.setdefault(_kind(case), case)
    wide = GroupedCase(8, 208, 544, exact=False)
    activated = [replace(wide, activation=each, gated=True) for each in ACTIVATIONS]
    activated += [replace(wide, activation=Activation(name)) for name in UNGATED]
    quantized = [
        replace(wide, tile_tokens=tokens, activation=activation, gated=gated, quantized=True)
        for tokens in (8, 64, 256)
        for activation, gated in ((SILU, True), (Activation("relu2"), False))
    ]
    return [*(kinds.values() if quick else tiled), wide, *activated, *quantized]


def _tiles(case: GroupedCase) -> list[Tile]:
    """Tiles that can serve a case."""
    problem = GroupedProblem(
        case.tile_tokens, case.n, case.k, sum(COUNTS) + SPARE, len(COUNTS), 1 + case.gated
    )
    output = EpilogueConfig(
        "float32",
        bias="bfloat16" if case.bias else "",
        row_scale=case.row_scale,
        activation=case.activation,
    )
    return [tile for tile, _ in grouped_candidates(problem, output)]


def _kind(case: GroupedCase) -> tuple[object, ...]:
    """Key of the traits of a case's tile: synchronisation, and scales at odd columns."""
    tile = case.tile
    assert tile is not None
    splits, shares, odd = tile.split_k > 1, tile.cluster_n > 1, tile.columns == 96
    return case.gated, tile.swap_ab, tile.two_cta, splits, shares, odd
