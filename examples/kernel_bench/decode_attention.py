"""Decode attention on this machine's Hopper, against vLLM's store and FlashAttention 3.

    python -m examples.kernel_bench.decode_attention
    python -m examples.kernel_bench.decode_attention --heads 16 --kv-heads 2 --batch 1 --context 512
    python -m examples.kernel_bench.decode_attention --cache bfloat16 fp8

All contenders run as in vLLM's decoding step: the block table has room for the model's context,
which also bounds the lengths; FlashAttention's schedule is made beforehand. With an E4M3 cache vLLM
quantises the queries too. Results and caches are compared first. Launches are captured in CUDA
graphs, which replay in turn; medians are printed. Caches rotate, so that L2 is always cold.
"""

import argparse
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from examples.command_line import refusals
from examples.kernel_bench.machine import cuda_device
from nvfp4_kernels import decode_attention
from nvfp4_kernels.tool.timed_graphs import Step, captured, timed

PAGE_SIZE = 16
COLD_BYTES = 256 << 20  # rotating caches: several times L2
MAX_SPLITS = 32  # vLLM's bound in CUDA graphs
# Largest difference of results, by the cache's dtype: FlashAttention rounds queries and P to E4M3,
# for which the bound is an estimate.
BOUNDS = {"bfloat16": 0.01, "fp8": 0.25}
DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Case:
    """Decode step of ``batch`` sequences with ``context`` keys each, and the attention's sizes.

    ``max_context`` is the model's context length, at least ``context``; ``cache`` a name of
    ``DTYPES``.
    """

    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    cache: str = "bfloat16"

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values of all sequences."""
        keys = self.batch * self.context * self.kv_heads
        return keys * 2 * self.head_dim * DTYPES[self.cache].itemsize

    @property
    def pages(self) -> int:
        return self.batch * -(-self.context // PAGE_SIZE)

    @property
    def copies(self) -> int:
        """Number of copies of the cache, used in turn so that L2 stays cold."""
        return min(32, max(2, -(-COLD_BYTES // self.bytes)))


@dataclass(frozen=True)
class Shared:
    """Tensors of a decode step that all layers share.

    Attributes:
        table: block table, int32 ``(batch, max_context / PAGE_SIZE)``.
        seq_lens: number of keys, int32 ``(batch,)``.
        slots: cache slot of each sequence's new key, int64 ``(batch,)``.
        query_start: first query of each sequence, int32 ``(batch + 1,)``.
        schedule: FlashAttention's scheduler metadata.
        scale: scale of queries, keys and values in E4M3, float32 ``()``.
    """

    table: Tensor
    seq_lens: Tensor
    slots: Tensor
    query_start: Tensor
    schedule: Tensor
    scale: Tensor


def step_of(case: Case) -> Shared:
    """Metadata of a decoding step, as in vLLM."""
    from vllm.vllm_flash_attn import get_scheduler_metadata  # only in vLLM's GPU build

    per_sequence = case.pages // case.batch
    table = torch.zeros(case.batch, case.max_context // PAGE_SIZE, dtype=torch.int32)
    table[:, :per_sequence] = torch.randperm(case.pages).view(case.batch, -1)
    last = case.context - 1
    slots = table[:, last // PAGE_SIZE].long() * PAGE_SIZE + last % PAGE_SIZE
    seq_lens = torch.full((case.batch,), case.context, dtype=torch.int32).cuda()
    query_start = torch.arange(case.batch + 1, dtype=torch.int32).cuda()
    schedule = get_scheduler_metadata(
        case.batch, 1, case.max_context, case.heads, case.kv_heads, case.head_dim, seq_lens,
        cu_seqlens_q=query_start, page_size=PAGE_SIZE, causal=True, num_splits=MAX_SPLITS,
        qkv_dtype=DTYPES[case.cache],
    )  # fmt: skip
    scale = torch.tensor(1.0 if case.cache == "bfloat16" else 0.0625, device="cuda")
    return Shared(table.cuda(), seq_lens, slots.cuda(), query_start, schedule, scale)


def ours(qkv: list[Tensor], cache: Tensor, shared: Shared, out: Tensor) -> None:
    """Launch ``decode_attention``, which also stores the new keys and values."""
    q, key, value = qkv
    scale = None if cache.dtype == q.dtype else shared.scale
    decode_attention(
        q, key, value, cache, shared.table, shared.seq_lens, shared.slots, k_scale=scale,
        v_scale=scale, out=out,
    )  # fmt: skip


def theirs(qkv: list[Tensor], cache: Tensor, case: Case, shared: Shared, out: Tensor) -> None:
    """Launch vLLM's store into the cache, then FlashAttention 3."""
    from vllm._custom_ops import reshape_and_cache_flash, scaled_fp8_quant
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    q, key, value = qkv
    keys, values = cache.unbind(1)
    fp8, scales, descales = cache.dtype != q.dtype, (shared.scale,) * 2, {}
    stored = [x.view(torch.uint8) if fp8 else x for x in (keys, values)]
    how = "fp8" if fp8 else "auto"
    reshape_and_cache_flash(key, value, *stored, shared.slots, how, *scales)
    if fp8:
        rows, _ = scaled_fp8_quant(q.reshape(len(q), -1), shared.scale)
        q = rows.view(q.shape)
        each = shared.scale.expand(case.batch, case.kv_heads)
        descales = {"q_descale": each, "k_descale": each, "v_descale": each}
    flash_attn_varlen_func(
        q, keys, values, max_seqlen_q=1, cu_seqlens_q=shared.query_start,
        max_seqlen_k=case.max_context, seqused_k=shared.seq_lens, causal=True,
        softmax_scale=case.head_dim**-0.5, block_table=shared.table, out=out, fa_version=3,
        scheduler_metadata=shared.schedule, num_splits=MAX_SPLITS, **descales,
    )  # fmt: skip


def by_half(cache: Tensor) -> Tensor:
    """Copy of our cache in vLLM's layout: keys and values apart, ``(pages, 2, rows, Hkv, D)``."""
    halves = cache.view(torch.uint8).chunk(2, -1)  # not every torch op takes float8
    return torch.stack([half.transpose(1, 2) for half in halves], 1).view(cache.dtype)


def contenders(case: Case) -> dict[str, list[Step]]:
    """Launches by contender, one for each copy of the cache.

    Results, and the stored keys and values, must agree on the first copy.
    """
    torch.manual_seed(0)
    shared = step_of(case)
    width = (case.heads + 2 * case.kv_heads) * case.head_dim
    rows = torch.randn(case.batch, width, device="cuda", dtype=torch.bfloat16)
    heads = [case.heads, case.kv_heads, case.kv_heads]
    qkv = [
        part.view(case.batch, -1, case.head_dim)
        for part in rows.split([h * case.head_dim for h in heads], 1)
    ]
    shape = case.pages, case.kv_heads, PAGE_SIZE, 2 * case.head_dim
    caches = [
        (torch.randn(shape, device="cuda") / shared.scale).to(DTYPES[case.cache])
        for _ in range(case.copies)
    ]
    flash = [by_half(cache) for cache in caches]
    out, rival_out = (rows.new_zeros(case.batch, case.heads, case.head_dim) for _ in range(2))
    ours(qkv, caches[0], shared, out)
    theirs(qkv, flash[0], case, shared, rival_out)
    apart = float((out.float() - rival_out.float()).abs().max())
    assert apart < BOUNDS[case.cache], f"{case}: {apart} from FlashAttention's result"
    pair = (x.view(torch.uint8) for x in (by_half(caches[0]), flash[0]))
    assert torch.equal(*pair), f"{case}: the caches differ"
    return {
        "ours": [partial(ours, qkv, cache, shared, out) for cache in caches],
        "FA3": [partial(theirs, qkv, cache, case, shared, rival_out) for cache in flash],
    }


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """Cases whose keys and values take at most ``--gigabytes``, by batch, context and cache."""
    for batch, context, cache in itertools.product(given.batch, given.context, given.cache):
        case = Case(
            batch, context, given.heads, given.kv_heads, given.head_dim,
            max(context, given.max_context), cache,
        )  # fmt: skip
        if case.bytes <= given.gigabytes * 1e9:
            yield case


def main() -> None:
    """Check and time all cases; print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 1024, 4096, 32768])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--max-context", type=int, default=8192, help="the model's")
    parser.add_argument("--cache", choices=DTYPES, nargs="+", default=["bfloat16"])
    parser.add_argument("--gigabytes", type=float, default=5, help="of a cache, at most")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    cuda_device()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{given.heads} heads, {given.kv_heads} of keys, D = {given.head_dim}")
    print(" batch  keys  cache        ours us  TB/s     store + FA3 us  TB/s      x")
    for case in cases(given):
        graphs = {name: captured(steps, 32) for name, steps in contenders(case).items()}
        times = timed(graphs, given.rounds)
        mine, rival = (statistics.median(times[name]) for name in ("ours", "FA3"))
        speeds = [case.bytes / us / 1e6 for us in (mine, rival)]
        print(
            f"{case.batch:6} {case.context:6}  {case.cache:8}  {mine:9.2f}  {speeds[0]:5.2f}  "
            f"{rival:15.2f}  {speeds[1]:5.2f}  {rival / mine:5.2f}",
            flush=True,
        )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with refusals():
        main()
