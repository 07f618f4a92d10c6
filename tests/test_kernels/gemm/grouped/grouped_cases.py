"""Grouped products: the cases of ``grouped_gemm`` and ``grouped_silu_mul_gemm``."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvfp4_kernels import moe_route
from nvfp4_kernels.activation import Activation
from nvfp4_kernels.formats.fragments import to_fragments
from nvfp4_kernels.formats.nvfp4 import from_blocked
from nvfp4_kernels.moe.routing import Routing
from tests.test_kernels import oracle
from tests.test_kernels.oracle import Float64
from tests.test_kernels.routing_cases import CASES as ROUTINGS
from tests.test_kernels.routing_cases import RoutingCase

FP32 = torch.float32


@dataclass(frozen=True)
class GroupedCase:
    """One problem; ``a_dtype`` is None for NVFP4 activations."""

    routing: RoutingCase
    n: int
    k: int
    a_dtype: torch.dtype | None = None
    row_scale: bool = False
    out_dtype: torch.dtype = FP32
    activation: Activation | None = None
    terms: int = 1
    fragments: bool = False
    bias: torch.dtype | None = None


@dataclass(frozen=True)
class GroupedProblem:
    """Arguments of the op, and their values in float64."""

    args: dict[str, Any]
    routing: Routing
    a: Float64  # (tiles, T, K)
    b: Float64  # (experts, [2,] N, K)
    alpha: Float64  # (experts, [2])
    row_factor: Float64  # (tiles, T)
    bias: Float64 | None = None  # (experts, [2,] N)

    @property
    def used(self) -> int:
        """Number of tiles in use."""
        return int(self.routing.groups[0])

    def products(self, tile: int) -> Float64:
        """Products of one tile with each of its expert's weights: ``([2,] T, N)``."""
        expert = int(self.routing.groups[1 + tile])
        product = oracle.product(self.a[tile], self.b[expert])
        factors = self.alpha[expert][..., None, None] * self.row_factor[tile][:, None]
        scaled = product * factors
        return scaled if self.bias is None else scaled + self.bias[expert][..., None, :]


def grouped_problem(case: GroupedCase, *, gated: bool, grid: bool = True) -> GroupedProblem:
    """Arguments for ``case``; with ``grid`` every float32 operation of the products is exact.

    Experts differ in weights and factors, and the gate's factors from the up projection's.
    """
    rng = np.random.default_rng(0)
    routing_case = case.routing
    routing = moe_route(
        routing_case.topk_ids(), routing_case.experts, routing_case.tile_tokens,
        routing_case.expert_map(),
    )  # fmt: skip
    shape = (*routing.slots.shape, case.k)
    make = oracle.grid_operand if grid else oracle.random_operand
    matrices = (routing_case.experts, *((2,) if gated else ()))
    b = make(rng, *matrices, case.n, case.k)
    alpha = 2.0 ** -rng.integers(4, 8, matrices).astype(np.float64)
    row_factor = np.ones(shape[:2])
    a_scales = None
    if case.a_dtype is None:
        a = make(rng, *shape, terms=case.terms)
        a_data, a_scales, a_values = a.data, a.scales, a.values
    else:
        a_values = rng.integers(-4, 5, shape).astype(np.float64)
        a_data = torch.from_numpy(a_values).to(case.a_dtype)
    if case.row_scale:
        row_factor = 2.0 ** rng.integers(-1, 2, shape[:2])
    args = {
        "a": a_data,
        "a_scales": a_scales,
        "groups": routing.groups,
        "b": b.data,
        "b_scales": b.scales,
        "alpha": torch.from_numpy(alpha).float(),
        "row_scale": torch.from_numpy(row_factor).float() if case.row_scale else None,
        "out_dtype": case.out_dtype,
        "terms": case.terms,
    }
    bias = None
    if case.bias is not None:  # as fine as the sums, so that nothing is rounded
        bias = rng.integers(-64, 65, (*matrices, case.n)) / 16
        args["bias"] = torch.from_numpy(bias).to(case.bias)
    if case.activation is not None:
        args["activation"] = case.activation
    if case.fragments:
        args |= dict(zip(("b", "b_scales"), stacked_fragments(b.data, b.scales), strict=True))
        args["n"] = case.n
    return GroupedProblem(args, routing, a_values, b.values, alpha, row_factor, bias)


def stacked_fragments(data: Tensor, blocked: Tensor) -> tuple[Tensor, Tensor]:
    """Weights ``(…, N, K/2)`` in fragments."""
    *batch, n, packed = data.shape
    linear = from_blocked(blocked, n, packed // 8)
    each = [
        to_fragments(codes, scales)
        for codes, scales in zip(data.flatten(0, -3), linear.flatten(0, -3), strict=True)
    ]
    stacked = (torch.stack(parts).unflatten(0, batch) for parts in zip(*each, strict=True))
    return tuple(stacked)  # type: ignore[return-value]


BF16, FP16 = torch.bfloat16, torch.float16
CASES = {
    "one token": GroupedCase(ROUTINGS["one token"], 48, 64),
    "no token": GroupedCase(ROUTINGS["no token"], 48, 64),
    "nothing routed": GroupedCase(ROUTINGS["nothing routed"], 48, 64),
    "all to one expert": GroupedCase(ROUTINGS["all to one expert"], 96, 192),
    "an expert per token": GroupedCase(ROUTINGS["an expert per token"], 64, 128),
    "ids of no expert": GroupedCase(ROUTINGS["ids of no expert"], 160, 96, row_scale=True),
    "128 experts": GroupedCase(ROUTINGS["128 experts"], 32, 64, out_dtype=BF16),
    "tiles of 16": GroupedCase(ROUTINGS["tiles of 16"], 144, 320, out_dtype=BF16),
    "tiles of 32": GroupedCase(ROUTINGS["tiles of 32"], 96, 256, row_scale=True),
    "tiles of 64": GroupedCase(ROUTINGS["tiles of 64"], 80, 160, out_dtype=FP16),
    "tiles of 128": GroupedCase(ROUTINGS["tiles of 128"], 272, 96, row_scale=True),
    "tiles of 256": GroupedCase(ROUTINGS["tiles of 256"], 136, 128),
    "I of Qwen3-30B": GroupedCase(ROUTINGS["linear map"], 768, 64),
    "I of GLM 4.5": GroupedCase(ROUTINGS["one expert"], 1408, 32),
    "I of Nemotron 3": GroupedCase(ROUTINGS["one expert"], 1856, 32),
    "K of Nemotron 3": GroupedCase(ROUTINGS["one expert"], 16, 1856),
    "bias": GroupedCase(ROUTINGS["linear map"], 80, 96, row_scale=True, bias=BF16),
    "bias, K of gpt-oss": GroupedCase(ROUTINGS["one expert"], 16, 2880, bias=FP32),
    "two terms": GroupedCase(ROUTINGS["linear map"], 64, 96, terms=2, row_scale=True),
    "three terms": GroupedCase(ROUTINGS["tiles of 64"], 64, 64, terms=3),
}
W4A16_CASES = {
    "bf16": GroupedCase(ROUTINGS["linear map"], 80, 96, BF16),
    "fp16": GroupedCase(ROUTINGS["ids of no expert"], 64, 64, FP16, out_dtype=FP16),
    "no token": GroupedCase(ROUTINGS["no token"], 64, 64, BF16, fragments=True),
    "bias": GroupedCase(ROUTINGS["linear map"], 80, 96, BF16, fragments=True, bias=BF16),
    "fragments": GroupedCase(ROUTINGS["linear map"], 80, 96, BF16, fragments=True),
    "fragments, fp16": GroupedCase(
        ROUTINGS["tiles of 64"], 128, 208, FP16, out_dtype=FP16, fragments=True
    ),
    "fragments, 128 experts": GroupedCase(ROUTINGS["128 experts"], 64, 64, BF16, fragments=True),
}
