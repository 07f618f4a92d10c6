"""``gemm`` and ``silu_mul_gemm`` on sm_90 with E4M3 tokens and folded weights."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import gemm, silu_mul_gemm
from nvfp4_kernels.formats.folded import FoldedWeight, to_folded
from nvfp4_kernels.formats.fp8_rows import to_rows
from nvfp4_kernels.formats.output import StaticFp8
from nvfp4_kernels.gemm import reference
from nvfp4_kernels.gemm.call import GemmCall, SiluMulGemmCall
from nvfp4_kernels.gemm.silu_mul import reference as pair_reference

pytestmark = [pytest.mark.arch("sm_90"), pytest.mark.schedules("random 1")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn


def truncation(k: int, largest: float) -> float:
    """Bound of the error by which a GPU's sums over K are smaller than the exact sums.

    Each ``wgmma`` adds 32 products and the sum so far, each truncated 13 bits below the largest
    (``tests/emulator/wgmma/rounding.py``). ``largest``: largest magnitude of all results. Sums on
    the way are assumed to stay below twice that; an error of one truncation is half a unit.
    """
    return -(-k // 32) * 34 / 2 * 2 * largest * 2.0**-14


class Case(NamedTuple):
    """Sizes and options of a product."""

    m: int
    n: int
    k: int
    out_dtype: torch.dtype = BF16
    bias: torch.dtype | None = None
    per_token: bool = False


CASES = {
    "one token": Case(1, 128, 64),
    "one block": Case(1, 16, 16),
    "no tokens": Case(0, 128, 64),
    "8 tokens, K in parts": Case(8, 256, 2048),
    "9 tokens, odd N": Case(9, 133, 144),
    "17 tokens, a scale per token": Case(17, 128, 256, per_token=True),
    "64 tokens in boxes": Case(64, 128, 128),
    "65 tokens, ragged": Case(65, 200, 80, per_token=True),
    "130 tokens, odd N": Case(130, 77, 96),
    "300 tokens": Case(300, 328, 192),
    "bias": Case(3, 144, 96, bias=BF16),
    "float32 bias, many tokens": Case(66, 144, 96, bias=FP32, per_token=True),
    "fp16": Case(7, 144, 96, out_dtype=FP16),
    "float32 out": Case(5, 144, 96, out_dtype=FP32),
    "float32 out, many tokens": Case(80, 144, 96, out_dtype=FP32),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
PAIRS = {
    "one token": Case(1, 128, 64),
    "8 tokens, K in parts": Case(8, 192, 1024),
    "odd N": Case(16, 77, 96),
    "33 tokens": Case(33, 128, 64, per_token=True),
    "64 tokens in boxes": Case(64, 128, 128),
    "150 tokens, ragged": Case(150, 200, 80),
}
EVERY_PAIR = pytest.mark.parametrize("case", PAIRS.values(), ids=PAIRS)


def weight(n: int, k: int, seed: int = 0) -> FoldedWeight:
    """Weight of any codes, with scales 1, 1.25 or 1.5 times a power of two: folding is exact."""
    generator = torch.Generator().manual_seed(n * k + seed)
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    exponents, quarters = (torch.randint(0, 3, (n, k // 16), generator=generator) for _ in range(2))
    folded = to_folded(data, torch.ldexp(1 + quarters / 4, exponents - 1).to(E4M3))
    assert not folded.row_error.any()
    return folded


def rows(m: int, k: int) -> Tensor:
    """E4M3 tokens of small integers."""
    generator = torch.Generator().manual_seed(m + k)
    return to_rows(torch.randint(-4, 5, (m, k), generator=generator).float().to(E4M3))


def factors(folded: FoldedWeight) -> Tensor:
    """Factors of rows, powers of two."""
    each = torch.arange(len(folded.row_scale)) % 3 - 6
    return folded.row_scale * torch.ldexp(torch.ones(len(each)), each)


def call_of(case: Case) -> GemmCall:
    folded = weight(case.n, case.k)
    scale = torch.ldexp(torch.ones(case.m), torch.arange(case.m) % 3 - 1)
    bias = None if case.bias is None else torch.arange(case.n).to(case.bias)
    return GemmCall(
        rows(case.m, case.k), None, folded.data, folded.scales, factors(folded), (case.n,),
        scale if case.per_token else None, bias, case.out_dtype,
    )  # fmt: skip


def pair_of(case: Case) -> SiluMulGemmCall:
    gate, up = (weight(case.n, case.k, seed) for seed in range(2))
    scale = torch.ldexp(torch.ones(case.m), torch.arange(case.m) % 3 - 1)
    alpha = torch.stack([factors(gate), factors(up)])
    return SiluMulGemmCall(
        rows(case.m, case.k), None, gate.data, gate.scales, up.data, up.scales, alpha,
        scale if case.per_token else None, case.n, case.out_dtype,
    )  # fmt: skip


@EVERY_CASE
def test_gemm_is_exact(case: Case, op_device: torch.device) -> None:
    call = call_of(case)
    expected, _ = reference.gemm(call)
    on = [t.to(op_device) if isinstance(t, Tensor) else t for t in call]
    a, _, b, b_scales, alpha, sizes, row_scale, bias, *_ = on
    found = gemm(
        a, None, b, b_scales, alpha, sizes, row_scale=row_scale, bias=bias, out_dtype=case.out_dtype
    )
    assert expected.count_nonzero() > 0.5 * expected.numel() or not case.m
    rtol, atol = 0.0, 0.0
    if op_device.type == "cuda" and case.m:
        rtol, atol = 2.0**-7, truncation(case.k, float(expected.abs().max()))
    torch.testing.assert_close(found.cpu(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("quantized", [False, True], ids=["16-bit", "E4M3"])
@EVERY_PAIR
def test_pair(case: Case, quantized: bool, op_device: torch.device) -> None:
    call = pair_of(case)
    output = StaticFp8(torch.tensor(2.0**-5)) if quantized else None
    expected, _ = pair_reference.silu_mul_gemm(call._replace(output=output))
    on = [t.to(op_device) if isinstance(t, Tensor) else t for t in call]
    a, _, b1, b1_scales, b2, b2_scales, alpha, row_scale, *_ = on
    put = None if output is None else StaticFp8(output.scale.to(op_device))
    found = silu_mul_gemm(
        a, None, b1, b1_scales, b2, b2_scales, alpha, row_scale=row_scale, n=case.n, output=put
    )
    # Exact sums, except on a GPU; exponentials of GPUs differ by ulps, which may move a rounding.
    if op_device.type == "cuda":
        scale = 2.0**-5 if quantized else 1.0
        values, exact = (x.cpu().float() * scale for x in (found, expected))
        largest = float(exact.abs().max())
        margin = 2.0**-3 * exact.abs() + 8 * truncation(case.k, largest)
        assert ((values - exact).abs() <= margin).all()
    elif quantized:
        steps = (found.cpu().view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
        assert steps.max() <= 1
        assert steps.float().mean() < 0.01
        assert expected.float().count_nonzero() > 0.5 * case.m * case.n
    else:
        torch.testing.assert_close(found.cpu(), expected, rtol=2.0**-7, atol=2.0**-20)
