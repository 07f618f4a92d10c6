"""Indexer's ops under ``torch.compile``, and the kernels that run them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import (
    IndexerKeys,
    indexer_gather_k,
    indexer_logits,
    indexer_quantize_q,
    indexer_score_topk,
    indexer_store_k,
    indexer_topk,
)
from nvfp4_kernels.dispatch import KernelTable
from nvfp4_kernels.indexer import kernels as config
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.indexer.indexer_cases import Case, run_logits, run_score_topk
from tests.test_kernels.indexer.indexer_oracle import FORMATS

FMTS = pytest.mark.parametrize("fmt", FORMATS)
OPS = torch.ops.nvfp4
TABLES = [table for table in vars(config).values() if isinstance(table, KernelTable)]


def global_scale(fmt: str) -> Tensor | None:
    return torch.tensor(0.01) if fmt == "nvfp4" else None


def problems(fmt: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Contiguous and paged arguments of two sizes; in the first, no two sizes are equal."""
    cases = Case(((30, 79, 2, 1, 9),) * 7, next_n=5), Case(((40, 41, 7),) * 9, next_n=3)
    # opcheck takes NaN for a difference.
    return [(p.contiguous(), p.paged(unused=0)) for p in (case.problem(fmt) for case in cases)]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.op)
def test_every_op_has_a_reference_on_cpu(table: KernelTable) -> None:
    for mode in ("float",) if table.op == "indexer_topk" else FORMATS:
        kernel = table.select(torch.device("cpu"), mode)
        special = "" if mode == "float" else f"_{mode}"
        assert kernel.label == f"nvfp4_{table.op}{special}/reference (cpu)"
        assert callable(kernel.load())
    assert len(TABLES) == 6


@pytest.mark.processes
@FMTS
def test_fake_kernels(fmt: str) -> None:
    (contiguous, paged), _ = problems(fmt)
    q, k = torch.randn(3, 8, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    cache, size = paged["cache"], paged["block_size"]
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    starts = torch.tensor([0, 20, 25], dtype=torch.int32)
    slots = torch.tensor([5, -1, 6])
    check_op(OPS.indexer_quantize_q, (q, fmt, global_scale(fmt)))
    check_op(OPS.indexer_store_k, (k, cache.clone(), slots, fmt, size, global_scale(fmt)))
    check_op(OPS.indexer_gather_k, (cache, table, starts, 25, 64, fmt, size))
    check_op(OPS.indexer_logits, tuple(contiguous.values()))
    check_op(OPS.indexer_logits_paged, tuple(paged.values()))
    *operands, name = contiguous.values()
    check_op(OPS.indexer_score_topk, (*operands, 4, name))
    *operands, name, size = paged.values()
    check_op(OPS.indexer_score_topk_paged, (*operands, 4, name, size))


def test_fake_topk() -> None:
    lens = torch.tensor([9, 2], dtype=torch.int32)
    check_op(OPS.indexer_topk, (torch.randn(2, 9), lens, 4, None))
    check_op(OPS.indexer_topk, (torch.randn(2, 9), lens // 2, 4, lens // 4))


@pytest.mark.processes
@FMTS
def test_compiled_prefill(fmt: str) -> None:
    """Queries quantised, keys stored and gathered, and top-k, in one graph."""

    def prefill(q: Tensor, k: Tensor, cache: Tensor, slots: Tensor, ke: Tensor) -> Any:
        scale = global_scale(fmt)
        data, scales = indexer_quantize_q(q, fmt, scale)
        cache = cache.clone()
        indexer_store_k(k, cache, slots, fmt, 16, scale)
        table = torch.arange(4, dtype=torch.int32).view(1, 4)
        starts = torch.tensor([0, 64], dtype=torch.int32)
        keys, key_scales = indexer_gather_k(cache, table, starts, 64, 64, fmt, 16)
        weights = torch.ones(q.shape[:2])
        seen = IndexerKeys(keys, key_scales, torch.zeros_like(ke), ke)
        logits = indexer_logits(data, scales, seen, weights, fmt)
        chosen = indexer_score_topk(data, scales, seen, weights, 5, fmt)
        return *indexer_topk(logits, ke, 5), *chosen

    calls: list[Any] = []
    for tokens in (5, 9):
        q, k = torch.randn(tokens, 8, 64).bfloat16(), torch.randn(tokens, 64).bfloat16()
        cache = torch.zeros(4, 16 * bytes_of_a_key(fmt), dtype=torch.uint8)
        ke = torch.arange(1, tokens + 1, dtype=torch.int32)
        calls.append(((q, k, cache, torch.arange(tokens), ke), {}))
    check_compiled(prefill, calls, graphs=1)


@pytest.mark.processes
@FMTS
def test_compiled_decode(fmt: str) -> None:
    def decode(**arguments: Any) -> Any:
        logits = run_logits(**arguments)
        return logits, *run_score_topk(**arguments, top_k=8)

    check_compiled(decode, [((), paged) for _, paged in problems(fmt)], graphs=1)


def bytes_of_a_key(fmt: str) -> int:
    return {"nvfp4": 36, "mxfp4": 34, "fp8": 68, "bf16": 128}[fmt]
