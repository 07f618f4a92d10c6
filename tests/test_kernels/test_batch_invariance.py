"""Batch-invariant references: a row's bits do not depend on the other rows of the batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import PerToken, gemm, paged_attention, quantize
from nvfp4_kernels.dispatch import KernelTable, NoKernelError
from nvfp4_kernels.each_row import by_row, row_product
from nvfp4_kernels.formats.nvfp4 import to_blocked
from nvfp4_kernels.gemm.call import GemmCall, SiluMulGemmCall
from nvfp4_kernels.gemm.kernels import KERNELS as GEMM
from nvfp4_kernels.gemm.silu_mul.kernels import KERNELS as SILU_MUL_GEMM
from nvfp4_kernels.quantize.call import RmsNormQuantizeCall
from nvfp4_kernels.quantize.rms_norm.arguments import Form
from nvfp4_kernels.quantize.rms_norm.kernels import KERNELS as NORMS

CPU = torch.device("cpu")
N, K = 200, 4096  # N is no multiple of a vector
ROWS = 37  # tokens of the batch: whole vectors of elements and some more
TOKENS = [0, 1, 17, 36]


def weight() -> tuple[Tensor, Tensor]:
    scales = torch.rand(N, K // 16).to(torch.float8_e4m3fn)
    return torch.randint(256, (N, K // 2), dtype=torch.uint8), to_blocked(scales)


def product(table: KernelTable, x: Tensor, weights: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Product of 16-bit or NVFP4 activations by a table's batch-invariant kernel."""
    kernel = table.select(CPU, "w4a16", batch_invariant=True).load()
    flat = [part for each in weights for part in each]
    if len(weights) == 1:
        given = x, None, *flat, torch.ones(1), [N], None, None, torch.float32
        out: Tensor = kernel(GemmCall(*given))[0]
    else:
        out, _ = kernel(SiluMulGemmCall(x, None, *flat, torch.ones(2), None, N, torch.float32))
    return out


@pytest.mark.parametrize(
    ("table", "weights"), [(GEMM, 1), (SILU_MUL_GEMM, 2)], ids=["gemm", "silu"]
)
def test_products(table: KernelTable, weights: int) -> None:
    x, given = torch.randn(ROWS, K).bfloat16(), [weight() for _ in range(weights)]
    whole = product(table, x, given)
    for row in TOKENS:
        assert torch.equal(product(table, x[row : row + 1], given)[0], whole[row])
    if weights == 1:
        usual = gemm(x, None, *given[0], torch.ones(1), [N], out_dtype=torch.float32)
        alone = gemm(x[:1], None, *given[0], torch.ones(1), [N], out_dtype=torch.float32)
        assert not torch.equal(usual[:1], alone), "why there are such kernels"
        torch.testing.assert_close(whole, usual, rtol=1e-5, atol=1e-3)


def test_nvfp4_activations() -> None:
    x, (data, scales) = torch.randn(ROWS, K).bfloat16(), weight()
    kernel = GEMM.select(CPU, "w4a4", batch_invariant=True).load()

    def run(rows: Tensor) -> Tensor:
        a, a_scales, row_scale = quantize(rows, PerToken())
        given = a, a_scales, data, scales, torch.ones(1), [N], row_scale, None, torch.float32
        out: Tensor = kernel(GemmCall(*given))[0]
        return out

    whole = run(x)
    assert all(torch.equal(run(x[row : row + 1])[0], whole[row]) for row in TOKENS)


def test_batches_of_matrices() -> None:
    x, w = torch.randn(2, 3, 5, 32), torch.randn(2, 3, 8, 32)
    torch.testing.assert_close(row_product(x, w.mT), x @ w.mT)
    torch.testing.assert_close(row_product(x, w[0, 0].mT), x @ w[0, 0].mT)
    assert row_product(x[:, :, :0], w.mT).shape == (2, 3, 0, 8)


def test_exponentials_depend_on_their_place() -> None:
    """SiLU is computed row by row because float32 results depend on a tensor's tail."""
    x, silu = torch.randn(64, 1 << 10), torch.nn.functional.silu
    ends = torch.cat([silu(row[i : i + 1]) for row in x[:8] for i in range(len(row))])
    assert not torch.equal(ends, silu(x)[:8].flatten())
    assert torch.equal(by_row(silu, x)[5], by_row(silu, x[5:6])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_do_not(dtype: torch.dtype) -> None:
    """SiLU of 16-bit types, which vLLM computes between our layers on a CPU, is batch-invariant."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    silu = torch.nn.functional.silu
    assert torch.equal(torch.cat([silu(each) for each in every.split(1)]), silu(every))


@pytest.mark.parametrize("k", [64, 4096, 18432])
def test_sums_of_rows(k: int) -> None:
    """Row sums of torch are independent, in vLLM's norms and log-softmax and in our norms."""
    x = torch.randn(ROWS, k)
    table = NORMS[Form(adds=False, per_token=True)]
    kernel = table.select(CPU, "w4a4", batch_invariant=True).load()

    def norm(x: Tensor) -> Tensor:
        codes: Tensor = kernel(RmsNormQuantizeCall(x, None, torch.ones(k), 1e-6, PerToken()))[0]
        return codes

    sums, logs, normed = x.square().mean(-1), x.log_softmax(-1), norm(x)
    for row in TOKENS:
        part = x[row : row + 1].clone()
        assert torch.equal(part.square().mean(-1)[0], sums[row])
        assert torch.equal(part.log_softmax(-1)[0], logs[row])
        assert torch.equal(norm(part)[0], normed[row])


@pytest.mark.parametrize("given", [{}, {"window": 100}, {"soft_cap": 20.0}], ids=str)
def test_attention(given: dict[str, Any]) -> None:
    """A sequence's last queries get the same bits in one prefill, in chunks, and as decodes."""
    keys, queries, heads, kv_heads, dim, page = 1100, 40, 4, 2, 128, 16
    pages = -(-keys // page)
    cache, q = (
        torch.randn(pages, kv_heads, page, 2 * dim).bfloat16(),
        torch.randn(queries, heads, dim),
    )
    q, table = q.bfloat16(), torch.randperm(pages, dtype=torch.int32).unsqueeze(0)

    def run(q: Tensor, lengths: list[int], counts: list[int], **more: Any) -> tuple[Tensor, Tensor]:
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return paged_attention(
            q, cache, table.expand(len(lengths), -1), torch.tensor(lengths, dtype=torch.int32),
            starts, max_query_len=max(counts), max_seq_len=max(lengths),
            **({"batch_invariant": True} | given | more),
        )  # fmt: skip

    out, lse = run(q, [keys], [queries])
    first = keys - queries
    chunks = [run(q[:25], [first + 25], [25]), run(q[25:], [keys], [15])]
    lengths = [first + 1 + i for i in range(queries)]
    decodes = run(q, lengths, [1] * queries)
    alone = [run(q[i : i + 1], [lengths[i]], [1]) for i in range(queries)]
    for found in (chunks, [decodes], alone):
        for part, expected in zip(zip(*found, strict=True), (out, lse), strict=True):
            assert torch.equal(torch.cat(part), expected)
    usual, usual_lse = run(q, [keys], [queries], batch_invariant=False)
    torch.testing.assert_close(out, usual, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(lse, usual_lse, rtol=1e-5, atol=1e-5)
    usual_decodes = run(q, lengths, [1] * queries, batch_invariant=False)
    assert not torch.equal(usual_lse, usual_decodes[1]), "why there is such a kernel"


def test_no_kernel() -> None:
    table = KernelTable("gemm", {("cpu", "w4a4"): ("reference", "nowhere:gemm")})
    assert table.find(CPU, "w4a4") is not None
    with pytest.raises(NoKernelError, match="gemm: no batch-invariant w4a4 kernel for cpu"):
        table.select(CPU, "w4a4", batch_invariant=True)
