"""Products with weights in fragments: bit-identical to the same weight in the blocked layout.

``test_gemm`` and its siblings compare the blocked layout with float64.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nvfp4_kernels import (
    InvalidArgument,
    NoKernelError,
    Static,
    gemm,
    gemv,
    silu_mul_gemm,
)
from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.dispatch import Kernel
from nvfp4_kernels.formats.fragments import to_fragments
from nvfp4_kernels.formats.nvfp4 import from_blocked
from nvfp4_kernels.gemm.arguments import check_layout_taken
from nvfp4_kernels.gemm.kernels import KERNELS as GEMM
from nvfp4_kernels.gemm.silu_mul.kernels import KERNELS as SILU_MUL_GEMM
from tests.sm90_product import sm90_ops
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.gemm import linear_cases
from tests.test_kernels.gemm.linear_cases import Case
from tests.test_kernels.gemm.silu_mul import test_silu_mul_gemm
from tests.test_kernels.gemm.silu_mul.test_silu_mul_gemm import Case as PairCase

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
Args = dict[str, Any]

CASES = {
    "one tile": Case(16, 64, 64, a_dtype=BF16),
    "one block": Case(1, 1, 16, a_dtype=FP16),
    "no rows": Case(0, 130, 96, a_dtype=BF16),
    "ragged": Case(7, 200, 80, a_dtype=BF16, out_dtype=BF16),
    "long K": Case(3, 65, 16 * 69, a_dtype=FP16, out_dtype=FP16),
    "shards inside a tile": Case(5, 100, 64, shards=(1, 3, 96), a_dtype=BF16),
    "an empty shard": Case(5, 64, 64, shards=(32, 0, 32), a_dtype=BF16),
    "bias": Case(9, 130, 96, bias=FP16, a_dtype=BF16),
    "batch": Case(5, 130, 48, batch=(2, 3), a_dtype=BF16, bias=BF16),
    "empty batch": Case(5, 130, 48, batch=(0,), a_dtype=BF16),
}
PAIR_CASES = {
    "one tile": PairCase(16, 64, 64, a_dtype=BF16),
    "no rows": PairCase(0, 144, 96, a_dtype=BF16),
    "ragged": PairCase(37, 208, 80, a_dtype=FP16, out_dtype=BF16),
    "rows of any number": PairCase(5, 65, 48, a_dtype=BF16),
    "batch": PairCase(5, 144, 48, batch=(2, 3), a_dtype=BF16, out_dtype=BF16),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
EVERY_PAIR = pytest.mark.parametrize("case", PAIR_CASES.values(), ids=PAIR_CASES)


def in_fragments(args: Args, *names: str) -> Args:
    """The same call with its weights in fragments."""
    changed = dict(args)
    for name in names:
        data, blocked = args[name], args[f"{name}_scales"]
        linear = from_blocked(blocked, data.shape[-2], data.shape[-1] // 8)
        changed[name], changed[f"{name}_scales"] = to_fragments(data, linear)
    return changed


def product_calls(case: Case) -> tuple[Args, Args]:
    """The same call in the blocked layout and in fragments, with all codes and scales."""
    args = linear_cases.random_problem(case).args
    return args, in_fragments(args, "b")


def pair_calls(case: PairCase) -> tuple[Args, Args]:
    args = test_silu_mul_gemm.make_problem(case, grid=False).args
    return args, {**in_fragments(args, "b1", "b2"), "n": case.n}


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return (
        ours.dtype == theirs.dtype
        and ours.shape == theirs.shape
        and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    )


# --- the same result --------------------------------------------------------------------------


@pytest.mark.parametrize("op", [gemm, gemv], ids=["gemm", "gemv"])
@EVERY_CASE
def test_product(op: Callable[..., Tensor], case: Case) -> None:
    blocked, fragments = product_calls(case)
    assert same_bits(op(**fragments), op(**blocked))


@EVERY_PAIR
def test_pair(case: PairCase) -> None:
    blocked, fragments = pair_calls(case)
    assert same_bits(silu_mul_gemm(**fragments), silu_mul_gemm(**blocked))
    assert same_bits(silu_mul_gemm(**blocked, n=case.n), silu_mul_gemm(**blocked))


@EVERY_CASE
def test_exact_on_grid_values(case: Case) -> None:
    """Products of grid values equal float64, without the blocked layout in between."""
    problem = linear_cases.grid_problem(case)
    expected = torch.from_numpy(problem.expected()).to(case.out_dtype)
    assert torch.equal(gemm(**in_fragments(problem.args, "b")), expected)


# --- on sm_90, down to the kernel -------------------------------------------------------------


@pytest.mark.parametrize("op", [gemm, gemv], ids=["gemm", "gemv"])
@EVERY_CASE
def test_product_on_sm_90(op: Callable[..., Tensor], case: Case) -> None:
    blocked, fragments = product_calls(case)
    expected = op(**blocked)
    with sm90_ops() as product:
        assert same_bits(op(**fragments), expected)
    assert product.rows == [fragments["a"].shape[:-1].numel()]


@EVERY_PAIR
def test_pair_on_sm_90(case: PairCase) -> None:
    blocked, fragments = pair_calls(case)
    expected = silu_mul_gemm(**blocked)
    with sm90_ops() as product:
        assert same_bits(silu_mul_gemm(**fragments), expected)
    assert product.rows == [fragments["a"].shape[:-1].numel()]


@pytest.mark.parametrize("table", [GEMM, SILU_MUL_GEMM], ids=lambda table: table.op)
def test_kernels(table: Any) -> None:
    """Each kernel takes the weight in one layout; the reference takes both."""
    reference = table.select(CPU, "w4a16")
    assert reference.weight_layout == "blocked"
    assert reference.takes("blocked")
    assert reference.takes("fragments")
    with standing_in("cpu", "sm_90"):
        kernel = table.select(CPU, "w4a16")
        assert kernel.label == f"nvfp4_{table.op}_w4a16/wgmma (sm_90)"
        assert kernel.target == f"nvfp4_kernels.gemm.sm90.launch:{table.op}"
        assert kernel.weight_layout == "fragments"
        assert kernel.takes("fragments")
        assert not kernel.takes("blocked")
        assert table.find(CPU, "w4a4") is None
        with pytest.raises(NoKernelError, match=rf"{table.op}: no w4a4 kernel for cpu \(sm_90\)"):
            table.select(CPU, "w4a4")
    with standing_in("cpu", "sm_100"):
        kernel = table.select(CPU, "w4a4")
        assert kernel.weight_layout == "blocked"
        assert not kernel.takes("fragments")
        assert table.find(CPU, "w4a16") is None


@pytest.mark.parametrize("op", [gemm, gemv], ids=["gemm", "gemv"])
def test_blocked_is_refused_on_sm_90(op: Callable[..., Tensor]) -> None:
    blocked, _ = product_calls(CASES["ragged"])
    message = (
        r"b: is in the layout 'blocked' \(b_scales are float8_e4m3fn\), must be in 'fragments' for "
        r"nvfp4_gemm_w4a16/wgmma \(sm_90\); make that .* with to_fragments\(\)"
    )
    with sm90_ops(), pytest.raises(InvalidArgument, match=message):
        op(**blocked)


def test_blocked_pair_is_refused_on_sm_90() -> None:
    blocked, _ = pair_calls(PAIR_CASES["ragged"])
    message = r"b1: is in the layout 'blocked' .* with to_fragments\(\)"
    with sm90_ops(), pytest.raises(InvalidArgument, match=message):
        silu_mul_gemm(**blocked)


def test_fragments_are_refused_by_a_kernel_of_the_blocked_layout() -> None:
    kernel = Kernel("gemm", "sm_100", "w4a16", "mixed", "math:fsum")
    _, fragments = product_calls(CASES["ragged"])
    message = (
        r"b: is in the layout 'fragments' \(b_scales are uint8\), must be in 'blocked' for "
        r"nvfp4_gemm_w4a16/mixed \(sm_100\); make that .* with to_blocked\(\), once, at load"
    )
    with pytest.raises(InvalidArgument, match=message):
        check_layout_taken("b", fragments["b_scales"], kernel)


def test_sm_100_has_no_kernel_for_16_bit_activations() -> None:
    _, fragments = product_calls(CASES["ragged"])
    with (
        standing_in("cpu", "sm_100"),
        pytest.raises(NoKernelError, match=r"no w4a16 kernel for cpu \(sm_100\)"),
    ):
        gemm(**fragments)


# --- compilation ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ragged", "shards inside a tile", "batch"])
def test_opcheck(name: str) -> None:
    _, fragments = product_calls(CASES[name])
    check_op(torch.ops.nvfp4.gemm.default, tuple(fragments.values()))


@pytest.mark.parametrize("name", ["ragged", "batch"])
def test_pair_opcheck(name: str) -> None:
    _, fragments = pair_calls(PAIR_CASES[name])
    order = (
        "a", "a_scales", "b1", "b1_scales", "b2", "b2_scales", "alpha", "row_scale", "n",
        "out_dtype", "terms",
    )  # fmt: skip
    check_op(torch.ops.nvfp4.silu_mul_gemm.default, tuple(fragments[name] for name in order))


@pytest.mark.parametrize("op", [gemm, gemv], ids=["gemm", "gemv"])
def test_compiled(op: Callable[..., Tensor]) -> None:
    calls = [product_calls(replace(CASES["bias"], m=m))[1] for m in (5, 17, 32)]
    check_compiled(op, [((), call) for call in calls], graphs=1)


def test_pair_compiled() -> None:
    calls = [pair_calls(replace(PAIR_CASES["ragged"], m=m))[1] for m in (5, 17, 32)]
    check_compiled(silu_mul_gemm, [((), call) for call in calls], graphs=1)


def test_fake_pair_needs_n_too() -> None:
    _, fragments = pair_calls(PAIR_CASES["ragged"])
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in fragments.items()
        }
        assert silu_mul_gemm(**fake).shape == (37, 208)
        with pytest.raises(InvalidArgument, match="n: is None, must be the rows of b1 and b2"):
            silu_mul_gemm(**{**fake, "n": None})


# --- refused ----------------------------------------------------------------------------------

_BYTES = torch.zeros(4, 2, 4, 8, 8, dtype=torch.uint8)

# Changed arguments of a valid call of N = 200 and K = 80 -> the message.
REFUSED: dict[str, tuple[Args, str]] = {
    "NVFP4 activations": (
        {"a": torch.zeros(7, 40, dtype=torch.uint8),
         "a_scales": torch.zeros(1, 2, 32, 16).to(torch.float8_e4m3fn)},
        r"b: is in fragments \(uint8 b_scales\), must be blocked for NVFP4 activations; "
        r".* to_blocked\(\), or pass 16-bit activations",
    ),
    "a is wide": ({"a": torch.zeros(7, 80)}, "a: dtype is float32, must be bfloat16, float16"),
    "a is 1-D": (
        {"a": torch.zeros(80, dtype=BF16)},
        r"a: shape is \(80,\), must be \(\.\.\., M, K\)",
    ),
    "a ends in half a block": (
        {"a": torch.zeros(7, 72, dtype=BF16)},
        r"a: shape is \(7, 72\), .* K a positive multiple of 16; pad K with zeros",
    ),
    "a is empty": (
        {"a": torch.zeros(7, 0, dtype=BF16)},
        r"a: shape is \(7, 0\), .* K a positive multiple of 16",
    ),
    "a has another K": (
        {"a": torch.zeros(7, 144, dtype=BF16)},
        r"b: shape is \(4, 2, 4, 32, 16\), must be \(4, 3, 4, 32, 16\); the fragments of N = 200 "
        r"\(shard_sizes\) × K = 144 \(a\); make them with to_fragments\(\)",
    ),
    "a row scale": (
        {"row_scale": torch.ones(7)},
        "row_scale: given with 16-bit activations",
    ),
    "b is signed": (
        {"b": torch.zeros(4, 2, 4, 32, 16, dtype=torch.int8)},
        "b: dtype is int8, must be uint8",
    ),
    "b is packed": (
        {"b": torch.zeros(200, 40, dtype=torch.uint8)},
        r"b: shape is \(200, 40\), must be \(4, 2, 4, 32, 16\); .* or pass float8_e4m3fn scales",
    ),
    "b is a batch": (
        {"b": torch.zeros(3, 4, 2, 4, 32, 16, dtype=torch.uint8), "b_scales": _BYTES[None]},
        r"b: shape is \(3, 4, 2, 4, 32, 16\), must be \(4, 2, .* from one matrix",
    ),
    "b_scales are bytes of the blocked layout": (
        {"b_scales": torch.zeros(2, 2, 32, 16, dtype=torch.uint8)},
        r"b_scales: shape is \(2, 2, 32, 16\), must be \(4, 2, 4, 8, 8\); the fragments of",
    ),
    "b_scales are of another weight": (
        {"b_scales": _BYTES[:3]},
        r"b_scales: shape is \(3, 2, 4, 8, 8\), must be \(4, 2, 4, 8, 8\)",
    ),
    "shards are too few": (
        {"shard_sizes": [192]},
        r"b: shape is \(4, 2, 4, 32, 16\), must be \(3, 2, 4, 32, 16\); .* N = 192",
    ),
    "a shard is negative": (
        {"shard_sizes": [-1, 201], "alpha": torch.ones(2)},
        r"shard_sizes: \[-1, 201\] adds up to 200, must be widths",
    ),
    "an alpha too many": ({"alpha": torch.ones(2)}, r"alpha: shape is \(2,\), must be \(1,\)"),
    "bias is of the padded rows": (
        {"bias": torch.ones(256)},
        r"bias: shape is \(256,\), must be \(200,\)",
    ),
    "out_dtype is float8": ({"out_dtype": torch.float8_e4m3fn}, "out_dtype: is torch.float8"),
}  # fmt: skip


@pytest.mark.parametrize("op", [gemm, gemv], ids=["gemm", "gemv"])
@pytest.mark.parametrize("what", REFUSED)
def test_refused(op: Callable[..., Tensor], what: str) -> None:
    changes, message = REFUSED[what]
    _, fragments = product_calls(CASES["ragged"])
    with pytest.raises(InvalidArgument, match=message):
        op(**{**fragments, **changes})


def test_too_many_rows_are_refused() -> None:
    _, fragments = product_calls(replace(CASES["ragged"], m=33))
    with pytest.raises(InvalidArgument, match="a: M is 33, must be at most 32; use gemm"):
        gemv(**fragments)


_PAIR_BYTES = torch.zeros(4, 2, 4, 32, 16, dtype=torch.uint8)

# Changes to a valid call of N = 208 and K = 80.
PAIR_REFUSED: dict[str, tuple[Args, str]] = {
    "NVFP4 activations": (
        REFUSED["NVFP4 activations"][0],
        r"b1: is in fragments \(uint8 b1_scales\), must be blocked for NVFP4 activations",
    ),
    "no n": ({"n": None}, "n: is None, must be the rows of b1 and b2, which their fragments pad"),
    "n has other tiles": (
        {"n": 257},
        r"b1: shape is \(4, 2, 4, 32, 16\), must be \(5, 2, .* N = 257 \(n\) × K = 80 \(a\)",
    ),
    "b2 is narrower": (
        {"b2": _PAIR_BYTES[:3], "b2_scales": _BYTES[:3]},
        r"b2: shape is \(3, 2, 4, 32, 16\), must be \(4, 2, 4, 32, 16\)",
    ),
    "scales of b2 are narrower": (
        {"b2_scales": _BYTES[:3]},
        r"b2_scales: shape is \(3, 2, 4, 8, 8\), must be \(4, 2, 4, 8, 8\)",
    ),
    "a has another K": (
        {"a": torch.zeros(37, 144, dtype=BF16)},
        r"b1: shape is \(4, 2, 4, 32, 16\), must be \(4, 3, 4, 32, 16\)",
    ),
    "b2 is blocked": (
        {"b2": torch.zeros(208, 40, dtype=torch.uint8),
         "b2_scales": torch.zeros(2, 2, 32, 16).to(torch.float8_e4m3fn)},
        "b2: is in the layout 'blocked', must be in 'fragments' as b1 is; bring both weights to",
    ),
    "a row scale": ({"row_scale": torch.ones(37)}, "row_scale: given with 16-bit activations"),
}  # fmt: skip


@pytest.mark.parametrize("what", PAIR_REFUSED)
def test_pair_refused(what: str) -> None:
    changes, message = PAIR_REFUSED[what]
    _, fragments = pair_calls(PAIR_CASES["ragged"])
    with pytest.raises(InvalidArgument, match=message):
        silu_mul_gemm(**{**fragments, **changes})


@pytest.mark.parametrize("n", [0, 207, 256])
def test_another_n_than_the_blocked_weights_is_refused(n: int) -> None:
    blocked, _ = pair_calls(PAIR_CASES["ragged"])
    with pytest.raises(InvalidArgument, match=f"n: is {n}, must be 208 as b1's rows; leave it out"):
        silu_mul_gemm(**blocked, n=n)


def test_quantised_results_are_refused() -> None:
    _, fragments = product_calls(CASES["ragged"])
    del fragments["out_dtype"]
    message = r"b: is in fragments .*, must be in the blocked layout .* for output=Static"
    with pytest.raises(InvalidArgument, match=message):
        gemm(**fragments, output=Static(torch.tensor(1.0)))


@pytest.mark.parametrize("which", ["b1", "b2"])
def test_quantised_pairs_are_refused(which: str) -> None:
    args, _ = pair_calls(PAIR_CASES["ragged"])
    del args["out_dtype"]
    changed = in_fragments(args, which)
    message = rf"{which}: is in fragments .*, must be in the blocked layout .* for output=Static"
    with pytest.raises(InvalidArgument, match=message):
        silu_mul_gemm(**changed, output=Static(torch.tensor(1.0)))
