"""Batch-invariant GPU kernels: a row's bits do not depend on the other rows of the batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import PerToken, paged_attention, quantize
from nvfp4_kernels.dispatch import KernelTable
from nvfp4_kernels.formats.fragments import to_fragments
from nvfp4_kernels.formats.nvfp4 import from_blocked, to_blocked
from nvfp4_kernels.gemm.call import GemmCall, SiluMulGemmCall
from nvfp4_kernels.gemm.kernels import KERNELS as GEMM
from nvfp4_kernels.gemm.silu_mul.kernels import KERNELS as SILU_MUL_GEMM
from nvfp4_kernels.quantize.call import RmsNormQuantizeCall
from nvfp4_kernels.quantize.rms_norm.arguments import Form
from nvfp4_kernels.quantize.rms_norm.kernels import KERNELS as NORMS
from tests.test_kernels.attention import test_rotary_attention as test_rotary

ONE_SCHEDULE = pytest.mark.schedules("random 1")
# A tile of few tokens would be the fastest for the smaller size.
SM100_SIZES = pytest.mark.parametrize(("n", "k"), [(192, 2048), (128, 128)])
SM90_SIZES = pytest.mark.parametrize(("n", "k"), [(192, 2048), (128, 128)])  # K in two, and whole
K = 1024  # K of the norm
ROWS = 150  # more than one tile of tokens
TOKENS = (0, 17, 149)


def weight(n: int, k: int) -> tuple[Tensor, Tensor]:
    scales = torch.rand(n, k // 16).to(torch.float8_e4m3fn)
    return torch.randint(256, (n, k // 2), dtype=torch.uint8), to_blocked(scales)


def check_rows(run: Any, x: Tensor, expected: Tensor | None = None) -> None:
    """Compare all rows at once with some rows in another order, and with single rows."""
    whole = run(x)
    if expected is not None:
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5 * expected.abs().max())
    order = torch.tensor([149, 0, 17])
    assert torch.equal(run(x[order]), whole[order])
    for row in TOKENS:
        assert torch.equal(run(x[row : row + 1])[0], whole[row])


ALPHA = 1 / 64
CALLS: dict[int, Any] = {1: GemmCall, 2: SiluMulGemmCall}  # by the number of weights


TABLES = pytest.mark.parametrize(
    ("table", "weights"), [(GEMM, 1), (SILU_MUL_GEMM, 2)], ids=["gemm", "silu_mul_gemm"]
)


@TABLES
@SM100_SIZES
@ONE_SCHEDULE
@pytest.mark.arch("sm_100")
def test_sm100(table: KernelTable, weights: int, n: int, k: int, op_device: torch.device) -> None:
    flat = [part.to(op_device) for _ in range(weights) for part in weight(n, k)]
    alpha = torch.full((weights,), ALPHA)

    def run(x: Tensor, batch_invariant: bool = True) -> Tensor:
        kernel = table.select(op_device, "w4a4", batch_invariant).load()
        a, a_scales, row_scale = (part.to(op_device) for part in quantize(x, PerToken()))
        more = ([n], row_scale, None) if weights == 1 else (row_scale, n)
        call = CALLS[weights](a, a_scales, *flat, alpha.to(op_device), *more, torch.float32)
        return kernel(call)[0].cpu()

    x = torch.randn(ROWS, k).bfloat16()
    check_rows(run, x, run(x, batch_invariant=False))


@TABLES
@SM90_SIZES
@ONE_SCHEDULE
@pytest.mark.arch("sm_90")
def test_sm90(table: KernelTable, weights: int, n: int, k: int, op_device: torch.device) -> None:
    given, alpha = [weight(n, k) for _ in range(weights)], torch.full((weights,), ALPHA)
    linear = [(data, from_blocked(scales, n, k // 16)) for data, scales in given]
    flat = [part.to(op_device) for each in linear for part in to_fragments(*each)]

    def run(x: Tensor, batch_invariant: bool = True) -> Tensor:
        kernel = table.select(op_device, "w4a16", batch_invariant).load()
        more = ([n], None, None) if weights == 1 else (None, n)
        operands = x.to(op_device), None, *flat, alpha.to(op_device)
        return kernel(CALLS[weights](*operands, *more, torch.float32))[0].cpu()

    x = torch.randn(ROWS, k).bfloat16()
    check_rows(run, x, run(x, batch_invariant=False))


@ONE_SCHEDULE
@pytest.mark.arch("sm_100")
def test_norm(op_device: torch.device) -> None:
    table = NORMS[Form(adds=True, per_token=True)]
    kernel = table.select(op_device, "w4a4", batch_invariant=True).load()
    residual, gain = torch.randn(K).bfloat16(), torch.randn(K).bfloat16().to(op_device)

    def run(x: Tensor) -> Tensor:
        beside = residual.expand(len(x), -1).contiguous().to(op_device)
        call = RmsNormQuantizeCall(x.to(op_device), beside, gain, 1e-6, PerToken())
        data, _, row_scale, _ = kernel(call)
        return torch.cat([data.cpu(), row_scale.cpu().unsqueeze(-1).view(torch.uint8)], -1)

    check_rows(run, torch.randn(ROWS, K).bfloat16() * torch.rand(ROWS, 1).bfloat16())


@ONE_SCHEDULE
@pytest.mark.arch("sm_100")
@pytest.mark.parametrize(
    "given",
    [{}, {"window": 100, "soft_cap": 20.0}, {"fp8": True}],
    ids=["causal", "window, soft cap", "fp8"],
)
def test_attention(given: dict[str, Any], op_device: torch.device) -> None:
    """A sequence's last queries get the same bits in one prefill, in chunks, and as decodes."""
    keys, queries, heads, kv_heads, dim, page = 300, 12, 2, 1, 64, 16
    options = dict(given)
    fp8 = options.pop("fp8", False)
    pages = -(-keys // page)
    table = torch.randperm(pages, dtype=torch.int32).unsqueeze(0)
    # Later keys are larger: the maxima of some rows grow where other rows' maxima do not.
    size = torch.linspace(1, 6, pages)[table[0].argsort()].view(-1, 1, 1, 1)
    cache = (size * torch.randn(pages, kv_heads, page, 2 * dim)).bfloat16()
    if fp8:
        cache = cache.to(torch.float8_e4m3fn)
        options |= {name: torch.tensor(0.5).to(op_device) for name in ("k_scale", "v_scale")}
    q = torch.randn(queries, heads, dim).bfloat16()

    def run(q: Tensor, lengths: list[int], counts: list[int], **more: Any) -> tuple[Tensor, ...]:
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        ints = table.expand(len(lengths), -1), torch.tensor(lengths, dtype=torch.int32), starts
        moved = (x.contiguous().to(op_device) for x in (q, cache, *ints))
        found = paged_attention(
            *moved, max_query_len=max(counts), max_seq_len=max(lengths),
            **({"batch_invariant": True} | options | more),
        )  # fmt: skip
        return tuple(x.cpu() for x in found)

    out, lse = run(q, [keys], [queries])
    first = keys - queries
    chunks = [run(q[:7], [first + 7], [7]), run(q[7:], [keys], [5])]
    lengths = [first + 1 + i for i in range(queries)]
    decodes = run(q, lengths, [1] * queries)
    for found in (chunks, [decodes]):
        for part, expected in zip(zip(*found, strict=True), (out, lse), strict=True):
            assert torch.equal(torch.cat(part), expected)
    alone = run(q[5:6], lengths[5:6], [1])
    assert torch.equal(alone[0][0], out[5])
    usual = run(q, [keys], [queries], batch_invariant=False)
    torch.testing.assert_close(usual[0], out, rtol=0.1 if fp8 else 2e-2, atol=0.3 if fp8 else 2e-2)
    assert not torch.equal(usual[1], lse), "why there is such a kernel"


@ONE_SCHEDULE
@pytest.mark.arch("sm_100")
def test_rotary_attention(op_device: torch.device) -> None:
    """Decodes in one launch are bit-identical to store and attention, as used for prefills."""
    case, how = test_rotary.HOW["partial, norms"]
    given = test_rotary.arguments(case, test_rotary.rotation(case, **how))
    test_rotary.check(test_rotary.on_device(op_device, given) | {"batch_invariant": True})
