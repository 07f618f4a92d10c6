"""Decode attention problems: paged attention whose last tokens are not yet stored."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import decode_attention
from tests.test_kernels.attention.attention_cases import FP8, FP16, Case, Problem, check_values

LENGTHS = (17, 1, 0, 16, 70)


def case(*lengths: int, **rest: Any) -> Case:
    """Sequences of ``lengths`` keys, with the last token of each as the query."""
    lengths = lengths or LENGTHS
    return Case((1,) * len(lengths), lengths, **rest)


CASES = {
    "MHA": case(query_heads=2),
    "groups of 4, D = 128": case(query_heads=8, head_dim=128),
    "groups of 7, D = 128": case(query_heads=7, heads=1, head_dim=128),
    "groups of 16": case(query_heads=32),
    "groups of 12, D = 128, fp16": case(query_heads=12, heads=1, head_dim=128, dtype=FP16),
    "groups of 2, D = 256": case(33, 0, query_heads=2, heads=1, head_dim=256),
    "groups of 16, D = 256": case(40, query_heads=16, heads=1, head_dim=256, dtype=FP16),
    "D = 96": case(query_heads=4, head_dim=96, window=20),
    "D = 192": case(query_heads=12, heads=1, head_dim=192, by_token=True, sinks=True),
    "fp16, heads after tokens": case(dtype=FP16, by_token=True),
    "pages of 64": case(page_size=64),
    "pages of 64, heads after tokens": case(page_size=64, by_token=True, head_dim=128),
    "window": case(window=12),
    "window of one": case(window=1),
    "long window": case(17, 400, window=250, page_size=32),
    "soft cap": case(soft_cap=2.0),
    "sinks": case(sinks=True, query_heads=18),
    "everything": case(
        window=21, soft_cap=3.0, sinks=True, scale=0.2, page_size=32, dtype=FP16, by_token=True
    ),
    "large scale": case(scale=1.5),
    "more than a round": case(600, 5, query_heads=2, heads=1),
}
# E4M3 caches: every head size, group, dtype and option.
FP8_CASES = {
    "MHA": case(query_heads=2, fp8=True),
    "groups of 4, D = 128": case(query_heads=8, head_dim=128, fp8=True),
    "groups of 7, D = 128, fp16": case(
        query_heads=7, heads=1, head_dim=128, dtype=FP16, fp8=True
    ),
    "groups of 16": case(query_heads=32, fp8=True),
    "groups of 12, D = 128": case(query_heads=12, heads=1, head_dim=128, fp8=True),
    "groups of 16, D = 256": case(40, 33, query_heads=16, heads=1, head_dim=256, fp8=True),
    "groups of 2, D = 256, fp16": case(
        33, 0, query_heads=2, heads=1, head_dim=256, dtype=FP16, fp8=True
    ),
    "D = 96": case(query_heads=4, head_dim=96, window=20, fp8=True),
    "groups of 16, D = 96, pages of 64": case(
        query_heads=16, heads=1, head_dim=96, page_size=64, by_token=True, fp8=True
    ),
    "D = 192, fp16": case(query_heads=12, heads=1, head_dim=192, dtype=FP16, sinks=True, fp8=True),
    "fp16, heads after tokens": case(dtype=FP16, by_token=True, fp8=True),
    "pages of 64, heads after tokens": case(page_size=64, by_token=True, head_dim=128, fp8=True),
    "window": case(window=12, fp8=True),
    "soft cap": case(soft_cap=2.0, fp8=True),
    "sinks": case(sinks=True, query_heads=18, fp8=True),
    "everything": case(
        window=21, soft_cap=3.0, sinks=True, scale=0.2, page_size=32, head_dim=128, by_token=True,
        query_heads=18, fp8=True,
    ),
    "large scale": case(scale=1.5, fp8=True),
    "more than a round": case(600, 5, query_heads=2, heads=1, fp8=True),
}  # fmt: skip
ALL_CASES = CASES | {f"E4M3, {name}": given for name, given in FP8_CASES.items()}
EVERY_CASE = pytest.mark.parametrize("given", ALL_CASES.values(), ids=ALL_CASES)


def arguments(problem: Problem, device: torch.device, garbage: float = math.nan) -> dict[str, Any]:
    """Arguments of ``decode_attention``: slices of a projection; free slots hold ``garbage``."""
    paged = problem.paged(garbage)
    q, heads = problem.q, problem.case.heads
    key, value = torch.zeros(2, len(q), heads, q.shape[2], dtype=q.dtype)
    row, size, slots = 0, problem.case.page_size, []
    for sequence, length in enumerate(problem.case.keys):
        row += length
        slots.append(-1)
        if length:
            key[sequence], value[sequence] = (x[row - 1] for x in _unscaled(problem))
            page = paged["block_table"][sequence, (length - 1) // size]
            unstored = paged["kv_cache"][page, :, (length - 1) % size]
            unstored.copy_(torch.full(unstored.shape, garbage).to(unstored.dtype))
            slots[-1] = int(page) * size + (length - 1) % size
    projected = torch.cat([q, key, value], 1).to(device)
    parts = projected.split([q.shape[1], heads, heads], 1)
    names = (
        "kv_cache", "block_table", "seq_lens", "scale", "window", "soft_cap", "sinks", "k_scale",
        "v_scale",
    )  # fmt: skip
    rest = {name: paged[name] for name in names} | {"slot_mapping": torch.tensor(slots)}
    rest = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in rest.items()}
    return dict(zip(("q", "key", "value"), parts, strict=True)) | rest


def _unscaled(problem: Problem) -> tuple[Tensor, Tensor]:
    """Keys and values as they are before the store: rounded to 16 bits, which E4M3 undoes."""
    pairs = (problem.k, problem.k_scale), (problem.v, problem.v_scale)
    k, v = (x if s is None else (x.float() * s).to(problem.q.dtype) for x, s in pairs)
    return k, v


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal bit for bit; NaN equals itself."""
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def stored(given: dict[str, Any]) -> Tensor:
    """Return the cache expected after the op."""
    cache = given["kv_cache"].clone()
    for sequence, slot in enumerate(given["slot_mapping"].tolist()):
        if slot >= 0:
            page, row = divmod(slot, cache.shape[2])
            pairs = zip(("key", "value"), ("k_scale", "v_scale"), strict=True)
            new = [_as_stored(given[x][sequence], given[scale]) for x, scale in pairs]
            cache[page, :, row].copy_(torch.cat(new, -1))
    return cache


def _as_stored(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else (x.float() / scale).clamp(-448, 448).to(FP8).float()


def solve(given: Case, device: torch.device) -> tuple[Tensor, Problem]:
    """Run the op and check the cache; return the result on the CPU."""
    torch.manual_seed(0)
    problem = given.problem()
    args = arguments(problem, device)
    expected = stored(args)
    out = decode_attention(**args, out=torch.full_like(args["q"], math.nan).contiguous())
    assert out.shape == args["q"].shape
    assert same_bits(args["kv_cache"], expected), "the cache is not as it should be"
    return out.cpu(), problem


def check_kernel(given: Case, device: torch.device) -> None:
    """Check the result and the cache."""
    out, problem = solve(given, device)
    check_values(out, problem, torch.finfo(p_dtype(given)).eps / 2)


def p_dtype(given: Case) -> torch.dtype:
    """Dtype of P, which V is multiplied with."""
    return FP16 if given.fp8 else given.dtype
