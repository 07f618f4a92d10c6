"""Products with an NVFP4 weight: cases of ``gemm`` and ``gemv``, and their expected results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.test_kernels import oracle
from tests.test_kernels.oracle import Float64

LinearOp = Callable[..., Tensor]

# Unit roundoff: half the distance from 1 to the next value.
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def rounding_error(magnitude: Float64, dtype: torch.dtype) -> Float64:
    """Largest error of rounding a value of at most this magnitude; subnormals are evenly spaced."""
    return ROUNDOFF[dtype] * np.maximum(magnitude, torch.finfo(dtype).tiny)


@dataclass(frozen=True)
class Case:
    """One problem; ``a_dtype`` is None for NVFP4 activations.

    Attributes:
        batch: batch dimensions of the activations, and with ``batched_weight`` of the weight too.
        shards: rows of each part of the weight that has its own alpha; empty for a single alpha.
        bias: dtype of the bias; None without one.
        terms: number of NVFP4 tensors whose sum is the activations.
    """

    m: int
    n: int
    k: int
    batch: tuple[int, ...] = ()
    batched_weight: bool = False
    shards: tuple[int, ...] = ()
    row_scale: bool = False
    bias: torch.dtype | None = None
    a_dtype: torch.dtype | None = None
    out_dtype: torch.dtype = torch.float32
    terms: int = 1


@dataclass(frozen=True)
class Problem:
    """Arguments of the op, and the same numbers in float64."""

    args: dict[str, Any]
    a: Float64  # (..., M, K)
    b: Float64  # (..., N, K)
    column_factor: Float64  # (N,)
    row_factor: Float64  # (..., M, 1)
    bias: Float64  # (N,)

    def run(self, op: LinearOp) -> Tensor:
        return op(**self.args)

    def expected(self) -> Float64:
        product = oracle.product(self.a, self.b)
        return product * self.column_factor * self.row_factor + self.bias

    def magnitude(self) -> Float64:
        """Sum of the magnitudes of all addends of each output element."""
        product = oracle.product(np.abs(self.a), np.abs(self.b))
        return product * np.abs(self.column_factor * self.row_factor) + np.abs(self.bias)


def grid_problem(case: Case) -> Problem:
    """Integers and powers of two, so that every float32 operation of the op is exact."""
    rng = np.random.default_rng(0)
    a: oracle.Operand | Float64
    if case.a_dtype is None:
        a = oracle.grid_operand(rng, *case.batch, case.m, case.k, terms=case.terms)
    else:
        a = rng.integers(-4, 5, (*case.batch, case.m, case.k)).astype(np.float64)
    b = oracle.grid_operand(rng, *_weight_batch(case), case.n, case.k)
    shards = case.shards or (case.n,)
    problem = _problem(
        case,
        a,
        b,
        alpha=2.0 ** -(6.0 + np.arange(len(shards))),
        row_scale=2.0 ** rng.integers(-1, 2, (*case.batch, case.m)),
        bias=rng.integers(-8, 9, case.n).astype(np.float64),
    )
    # Operands are multiples of 1/2, so any partial sum of products is a multiple of 1/4.
    assert oracle.product(np.abs(problem.a), np.abs(problem.b)).max(initial=0) * 4 < 2**24
    return problem


def random_problem(case: Case) -> Problem:
    """Problem of all codes, scales over twelve octaves, and arbitrary factors."""
    rng = np.random.default_rng(0)
    a: oracle.Operand | Float64
    if case.a_dtype is None:
        a = oracle.random_operand(rng, *case.batch, case.m, case.k, terms=case.terms)
    else:
        a = rng.standard_normal((*case.batch, case.m, case.k))
    b = oracle.random_operand(rng, *_weight_batch(case), case.n, case.k)
    return _problem(
        case,
        a,
        b,
        alpha=rng.uniform(1e-5, 1e-3, len(case.shards or (case.n,))),
        row_scale=rng.uniform(0.1, 3.0, (*case.batch, case.m)),
        bias=rng.standard_normal(case.n),
    )


def _weight_batch(case: Case) -> tuple[int, ...]:
    return case.batch if case.batched_weight else ()


def _problem(
    case: Case,
    a: oracle.Operand | Float64,
    b: oracle.Operand,
    *,
    alpha: Float64,
    row_scale: Float64,
    bias: Float64,
) -> Problem:
    if isinstance(a, oracle.Operand):
        a_data, a_scales, a_values = a.data, a.scales, a.values
    else:
        a_data, a_scales = torch.from_numpy(a).to(case.a_dtype), None
        a_values = oracle.float64(a_data)
    shards = case.shards or (case.n,)
    alpha_tensor = torch.from_numpy(alpha).float()
    row_tensor = torch.from_numpy(row_scale).float() if case.row_scale else None
    bias_tensor = torch.from_numpy(bias).to(case.bias) if case.bias is not None else None
    return Problem(
        args={
            "a": a_data,
            "a_scales": a_scales,
            "b": b.data,
            "b_scales": b.scales,
            "alpha": alpha_tensor,
            "shard_sizes": shards,
            "row_scale": row_tensor,
            "bias": bias_tensor,
            "out_dtype": case.out_dtype,
            "terms": case.terms,
        },
        a=a_values,
        b=b.values,
        column_factor=np.repeat(oracle.float64(alpha_tensor), shards),
        row_factor=np.ones(1) if row_tensor is None else oracle.float64(row_tensor)[..., None],
        bias=np.zeros(1) if bias_tensor is None else oracle.float64(bias_tensor),
    )


def check_exact(op: LinearOp, case: Case) -> None:
    """Check that grid values give the float64 result, rounded once to the output's dtype."""
    problem = grid_problem(case)
    expected = torch.from_numpy(problem.expected()).to(case.out_dtype)
    actual = problem.run(op)
    assert actual.dtype == case.out_dtype
    assert actual.shape == (*case.batch, case.m, case.n)
    assert torch.equal(actual, expected)


def check_close(op: LinearOp, case: Case) -> None:
    """Check random values within the error bound of float32 sums in any order.

    Products are exact (at most 6 significant bits from NVFP4 and 11 from float16). A sum has K
    products per term, so each product is rounded at most K times the number of terms; alpha, row
    scale and bias add three roundings, and the output one.
    """
    problem = random_problem(case)
    expected, actual = problem.expected(), oracle.float64(problem.run(op))
    accumulation = (case.k * case.terms + 3) * ROUNDOFF[torch.float32] * problem.magnitude()
    bound = accumulation + rounding_error(np.abs(expected) + accumulation, case.out_dtype)
    assert (np.abs(actual - expected) <= bound).all()
