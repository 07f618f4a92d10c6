"""``silu_mul_gemm``: silu(alpha₁ · A · B1ᵀ) · (alpha₂ · A · B2ᵀ), plain and quantised."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_kernels import (
    InvalidArgument,
    NoKernelError,
    PerToken,
    Static,
    gemm,
    quantize,
    silu_mul_gemm,
)
from nvfp4_kernels.gemm.silu_mul import op as silu_mul_gemm_op
from tests.test_kernels import oracle
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.gemm.linear_cases import ROUNDOFF, LinearOp, rounding_error
from tests.test_kernels.gemm.refused import below_the_dispatcher
from tests.test_kernels.oracle import Float64

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """One problem; ``a_dtype`` is None for NVFP4 activations."""

    m: int
    n: int
    k: int
    batch: tuple[int, ...] = ()
    batched_weight: bool = False
    row_scale: bool = False
    a_dtype: torch.dtype | None = None
    out_dtype: torch.dtype = FP32
    terms: int = 1


CASES = {
    "one tile": Case(128, 128, 64),
    "one block": Case(1, 16, 16),
    "one row": Case(1, 256, 128, out_dtype=BF16),
    "no rows": Case(0, 128, 64),
    "ragged": Case(131, 208, 80),
    "odd number of blocks": Case(5, 144, 16 * 7),
    "narrower than an atom": Case(33, 48, 96),
    "fp16 out": Case(9, 144, 96, out_dtype=FP16),
    "row scale": Case(37, 144, 96, row_scale=True),
    "batch": Case(5, 144, 48, batch=(3,), row_scale=True),
    "batched weight": Case(5, 144, 48, batch=(2, 3), batched_weight=True, out_dtype=BF16),
    "empty batch": Case(5, 144, 48, batch=(0,)),
    "3 terms, one row": Case(1, 256, 128, out_dtype=BF16, terms=3),
    "2 terms, ragged": Case(131, 208, 80, terms=2),
    "4 terms, batched weight": Case(
        5, 144, 48, batch=(2, 3), batched_weight=True, row_scale=True, terms=4
    ),
    "w4a16 bf16": Case(37, 144, 96, a_dtype=BF16, out_dtype=BF16),
    "w4a16 fp16": Case(2, 144, 96, batch=(2,), batched_weight=True, a_dtype=FP16),
    "Qwen3 0.6B, N/12": Case(17, 256, 1024, out_dtype=BF16),
    "Qwen3 30B-A3B, 4 experts, N/12": Case(
        2, 64, 2048, batch=(4,), batched_weight=True, out_dtype=BF16
    ),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@dataclass(frozen=True)
class Problem:
    """Arguments of the op, and the two projections in float64."""

    args: dict[str, Any]
    gate: Float64
    up: Float64
    gate_magnitude: Float64
    up_magnitude: Float64


def make_problem(case: Case, *, grid: bool) -> Problem:
    """Return a problem; ``grid``: integers and powers of two, every gate at least 32."""
    rng = np.random.default_rng(0)
    weight_shape = (*(case.batch if case.batched_weight else ()), case.n, case.k)
    a_shape = (*case.batch, case.m, case.k)
    if grid:
        gate, up, a = (
            oracle.positive_operand(rng, *weight_shape),
            oracle.grid_operand(rng, *weight_shape),
            oracle.positive_operand(rng, *a_shape, terms=case.terms),
        )
        # The gate is at least K; alpha makes it 64 or more, the row scale halves it at most.
        alpha = np.array([2.0 ** (6 - int(np.log2(case.k))), 0.25])
        rows = 2.0 ** rng.integers(-1, 1, a_shape[:-1]).astype(np.float64)
    else:
        gate, up = (oracle.random_operand(rng, *weight_shape) for _ in range(2))
        a = oracle.random_operand(rng, *a_shape, terms=case.terms)
        # Elements have a root mean square of 47: gates and ups of a few units, of either sign.
        rms = 47 * (47 if case.a_dtype is None else 1)
        alpha = rng.uniform(1, 2, 2) / (case.k**0.5 * rms)
        rows = rng.uniform(0.3, 3.0, a_shape[:-1])
    args: dict[str, Any] = {"a": a.data, "a_scales": a.scales}
    a_values = a.values
    if case.a_dtype is not None:
        wide = a_values if grid else rng.standard_normal(a_shape)
        args = {"a": torch.from_numpy(wide).to(case.a_dtype), "a_scales": None}
        a_values = oracle.float64(args["a"])
    args |= {"b1": gate.data, "b1_scales": gate.scales, "b2": up.data, "b2_scales": up.scales}
    args["alpha"] = torch.from_numpy(alpha).float()
    args["row_scale"] = torch.from_numpy(rows).float() if case.row_scale else None
    args |= {"out_dtype": case.out_dtype, "terms": case.terms}
    factors = oracle.float64(args["alpha"])
    row = oracle.float64(args["row_scale"])[..., None] if case.row_scale else np.ones(1)

    def project(x: Float64, weight: Float64, factor: float) -> Float64:
        return oracle.product(x, weight) * factor * row

    return Problem(
        args,
        project(a_values, gate.values, factors[0]),
        project(a_values, up.values, factors[1]),
        project(np.abs(a_values), np.abs(gate.values), factors[0]),
        project(np.abs(a_values), np.abs(up.values), factors[1]),
    )


def check_exact(op: LinearOp, case: Case) -> None:
    """Check exactly: from 32 on silu is the identity in float32, which leaves an exact product."""
    problem = make_problem(case, grid=True)
    assert problem.gate.min(initial=32.0) >= 32.0
    for exact in (problem.gate, problem.up):
        assert (exact.astype(np.float32) == exact).all()
    expected = (problem.gate * problem.up).astype(np.float32)
    actual = op(**problem.args)
    assert actual.dtype == case.out_dtype
    assert torch.equal(actual, torch.from_numpy(expected).to(case.out_dtype))


def check_close(op: LinearOp, case: Case) -> None:
    """Check projections within the bound of float32 sums, times silu's slope of at most 1.1.

    K products and two factors round at most K + 2 times; silu and the product add at most eight
    more roundings of the result, and the output one.
    """
    check_within(op, case, make_problem(case, grid=False), 8 * ROUNDOFF[FP32], 0.0)


def check_wide_gates(op: LinearOp, case: Case) -> None:
    """Check like ``check_close``, with neighbouring gates of either sign, up to 60.

    The error of e^-x grows with x; below -21.4 silu may stay at its value at -21.4, within 1.1e-8
    of zero.
    """
    problem = make_problem(case, grid=False)
    factor = float(np.float32(60.0 / np.abs(problem.gate).max()))
    args = {**problem.args, "alpha": problem.args["alpha"] * torch.tensor([factor, 1.0])}
    gate, magnitude = problem.gate * factor, problem.gate_magnitude * factor
    for some in (gate < -30, gate > 30, np.abs(gate) < 1):
        assert some.any()
    wide = replace(problem, args=args, gate=gate, gate_magnitude=magnitude)
    check_within(op, case, wide, (8 + np.abs(gate)) * ROUNDOFF[FP32], 1.1e-8)


def check_within(
    op: LinearOp, case: Case, problem: Problem, relative: float | Float64, absolute: float
) -> None:
    """Check the result's bound; ``relative``, ``absolute``: silu's error, added to the sums'."""
    silu = problem.gate / (1 + np.exp(-problem.gate))
    expected = silu * problem.up
    actual = oracle.float64(op(**problem.args))
    accumulation = (case.k + 2) * ROUNDOFF[FP32]
    gate_error = 1.1 * accumulation * problem.gate_magnitude
    up_error = accumulation * problem.up_magnitude
    bound = gate_error * np.abs(problem.up) + np.abs(silu) * up_error + gate_error * up_error
    bound += relative * np.abs(expected) + absolute * np.abs(problem.up)
    bound += rounding_error(np.abs(expected) + bound, case.out_dtype)
    assert (np.abs(actual - expected) <= bound).all()


def check_negative_gates(op: LinearOp, absolute: float = 0.0) -> None:
    """Check that silu of very negative gates is 0, within ``absolute``, and not NaN."""
    problem = make_problem(CASES["one tile"], grid=True)
    for factor in (-16.0, -1e30):
        args = {**problem.args, "alpha": problem.args["alpha"] * torch.tensor([factor, 1.0])}
        assert (np.abs(oracle.float64(op(**args))) <= absolute * np.abs(problem.up)).all()


def check_nan(op: LinearOp) -> None:
    """Check that NaN stays in its token, or in one row of the gate's weight."""
    args = make_problem(Case(5, 144, 96, row_scale=True), grid=False).args
    sound = op(**args)
    of_token = args["row_scale"].clone()
    of_token[2] = torch.nan
    of_row = args["b1_scales"].clone()
    of_row.view(torch.uint8)[0, 0, 5, 0] = 0x7F
    for changed, place in (
        ({"row_scale": of_token}, np.s_[2]),
        ({"b1_scales": of_row}, np.s_[:, 5]),
    ):
        found, expected = op(**args | changed), sound.clone()
        expected[place] = torch.nan
        # A reciprocal shared by several values rounds differently.
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0, equal_nan=True)


def check_alphas(op: LinearOp) -> None:
    """Check that each projection has its own alpha."""
    problem = make_problem(CASES["one tile"], grid=True)
    args = {**problem.args, "alpha": problem.args["alpha"] * torch.tensor([2.0, 8.0])}
    assert torch.equal(op(**args), op(**problem.args) * 16)


@EVERY_CASE
def test_exact_on_grid_values(case: Case) -> None:
    check_exact(silu_mul_gemm, case)


@EVERY_CASE
def test_close_on_random_values(case: Case) -> None:
    check_close(silu_mul_gemm, case)


def test_negative_gates_close() -> None:
    check_negative_gates(silu_mul_gemm)


def test_nan_stays_alone() -> None:
    check_nan(silu_mul_gemm)


def test_each_projection_has_its_own_alpha() -> None:
    check_alphas(silu_mul_gemm)


# --- quantised output -------------------------------------------------------------------------


def quantized_args(problem: Problem) -> dict[str, Any]:
    args = {name: value for name, value in problem.args.items() if name != "out_dtype"}
    return {**args, "output": Static(torch.tensor(0.01))}


@EVERY_CASE
def test_quantized_is_the_float32_result_quantized(case: Case) -> None:
    problem = make_problem(case, grid=False)
    args = quantized_args(problem)
    data, scales = silu_mul_gemm(**args)
    full = silu_mul_gemm(**{**problem.args, "out_dtype": FP32})
    expected_data, expected_scales = quantize(full, args["output"])
    assert torch.equal(data, expected_data)
    assert scales.shape == expected_scales.shape
    assert torch.equal(scales.view(torch.uint8), expected_scales.view(torch.uint8))


@pytest.mark.parametrize("name", ["ragged", "batch", "batched weight", "no rows", "w4a16 bf16"])
def test_quantized_feeds_gemm(name: str) -> None:
    case = CASES[name]
    data, scales = silu_mul_gemm(**quantized_args(make_problem(case, grid=False)))
    down = oracle.random_operand(np.random.default_rng(1), 32, case.n)
    out = gemm(data, scales, down.data, down.scales, torch.tensor([0.01]), [32])
    assert out.shape == (*case.batch, case.m, 32)
    assert out.isfinite().all()


# --- compilation and errors -------------------------------------------------------------------


def ordered(args: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return (*(args[n] for n in ("a", "a_scales", "b1", "b1_scales", "b2", "b2_scales", "alpha")),
            *(args[n] for n in names))  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("name", ["batch", "4 terms, batched weight", "w4a16 bf16"])
def test_opcheck(name: str) -> None:
    problem = make_problem(CASES[name], grid=False)
    plain = ordered({**problem.args, "n": None}, "row_scale", "n", "out_dtype", "terms")
    check_op(torch.ops.nvfp4.silu_mul_gemm.default, plain)
    quantized = (*ordered(problem.args, "row_scale"), torch.tensor(0.01), problem.args["terms"], 3)
    check_op(torch.ops.nvfp4.silu_mul_gemm_quantized.default, quantized)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["batch", "w4a16 bf16"])
def test_compiled(name: str) -> None:
    problems = [make_problem(replace(CASES[name], m=m), grid=False) for m in (5, 40, 128)]
    check_compiled(silu_mul_gemm, [((), p.args) for p in problems], graphs=1)
    check_compiled(silu_mul_gemm, [((), quantized_args(p)) for p in problems], graphs=1)


E4M3 = torch.float8_e4m3fn
GOOD = Case(5, 144, 96)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "b1 is signed": (
        {"b1": torch.zeros(144, 48, dtype=torch.int8)},
        "b1: dtype is int8, must be uint8",
    ),
    "b1_scales are linear": (
        {"b1_scales": torch.zeros(144, 6).to(E4M3)},
        r"b1_scales: shape is \(144, 6\), must be \(2, 2, 32, 16\); .* with to_blocked",
    ),
    "b2_scales are linear": (
        {"b2_scales": torch.zeros(144, 6).to(E4M3)},
        r"b2_scales: shape is \(144, 6\), must be \(2, 2, 32, 16\); .* with to_blocked",
    ),
    "b2 is narrower": (
        {
            "b2": torch.zeros(128, 48, dtype=torch.uint8),
            "b2_scales": torch.zeros(1, 2, 32, 16).to(E4M3),
        },
        r"b2: shape is \(128, 48\), must be \(144, 48\) as b1's; .* come in pairs",
    ),
    "a is not batched as the weights": (
        {
            "b1": torch.zeros(2, 144, 48, dtype=torch.uint8),
            "b1_scales": torch.zeros(2, 2, 2, 32, 16).to(E4M3),
            "b2": torch.zeros(2, 144, 48, dtype=torch.uint8),
            "b2_scales": torch.zeros(2, 2, 2, 32, 16).to(E4M3),
        },
        r"batch dimensions are \(2,\), must be none or \(\) as a's",
    ),
    "a has another K": (
        {
            "a": torch.zeros(5, 32, dtype=torch.uint8),
            "a_scales": torch.zeros(1, 1, 32, 16).to(E4M3),
        },
        "a: K is 64, must be 96 as the weight's",
    ),
    "a is packed without scales": (
        {"a_scales": None},
        "a: dtype is uint8, must be bfloat16, float16",
    ),
    "16-bit a has a row scale": (
        {"a": torch.zeros(5, 96, dtype=BF16), "a_scales": None, "row_scale": torch.ones(5)},
        "row_scale: given with 16-bit activations",
    ),
    "row_scale is short": (
        {"row_scale": torch.ones(4)},
        r"row_scale: shape is \(4,\), must be \(5,\)",
    ),
    "one alpha": (
        {"alpha": torch.ones(1)},
        r"alpha: shape is \(1,\), must be \(2,\); one factor for the gate and one for the up",
    ),
    "alpha is double": (
        {"alpha": torch.ones(2, dtype=torch.float64)},
        "alpha: dtype is float64, must be float32",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    changes, message = REFUSED[what]
    problem = make_problem(GOOD, grid=True)
    with pytest.raises(InvalidArgument, match=message):
        silu_mul_gemm(**{**problem.args, **changes})
    with pytest.raises(InvalidArgument, match=message):
        silu_mul_gemm(**{**quantized_args(problem), **changes})


def test_refused_out_dtype() -> None:
    args = {**make_problem(GOOD, grid=True).args, "out_dtype": torch.float64}
    with pytest.raises(InvalidArgument, match=r"out_dtype: is torch\.float64, must be one of"):
        silu_mul_gemm(**args)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"output": Static(torch.ones(2))},
            r"output.global_scale: shape is \(2,\), must be \(\); one scale",
        ),
        (
            {"output": Static(torch.tensor(1.0, dtype=BF16))},
            "output.global_scale: dtype is bfloat16, must be float32",
        ),
        ({"output": Static(torch.tensor(1.0), 0)}, "output.terms: is 0, must be 1 to 4"),
        ({"output": PerToken()}, "output: is a PerToken, must be None or Static"),
        ({"output": torch.tensor(1.0)}, "output: is a Tensor, must be None or Static"),
        ({"out_dtype": FP32}, "out_dtype: is torch.float32 with output=Static.*must be left out"),
        ({"n": 144}, "n: is 144 with output=Static.*, must be left out"),
    ],
    ids=["shape", "dtype", "terms", "per token", "tensor", "out_dtype", "n"],
)
def test_refused_output(changes: dict[str, Any], message: str) -> None:
    args = quantized_args(make_problem(GOOD, grid=True))
    with pytest.raises(InvalidArgument, match=message):
        silu_mul_gemm(**{**args, **changes})


def test_refused_output_of_partial_blocks() -> None:
    args = quantized_args(make_problem(replace(GOOD, n=136), grid=True))
    with pytest.raises(InvalidArgument, match="K is 136, must be a multiple of 16"):
        silu_mul_gemm(**args)


def test_refused_1d_activation() -> None:
    args = {
        **quantized_args(make_problem(GOOD, grid=True)),
        "a": torch.zeros(48, dtype=torch.uint8),
    }
    with pytest.raises(InvalidArgument, match=r"a: shape is \(48,\)"):
        silu_mul_gemm(**args)


def test_devices() -> None:
    implementation = below_the_dispatcher(silu_mul_gemm_op._silu_mul_gemm, "silu_mul_gemm")
    args = {**make_problem(GOOD, grid=True).args, "row_scale": torch.ones(5), "n": None}
    tensors = [name for name, value in args.items() if isinstance(value, Tensor)]
    for name in tensors[1:]:
        with pytest.raises(InvalidArgument, match=f"{name}: is on meta, must be on cpu as a is"):
            implementation(**{**args, name: args[name].to("meta")})
    everything = {**args, **{name: args[name].to("meta") for name in tensors}}
    there_is = r"no w4a4 kernel for meta \(meta\); there is nvfp4_silu_mul_gemm/reference \(cpu\)"
    with pytest.raises(NoKernelError, match=there_is):
        implementation(**everything)
