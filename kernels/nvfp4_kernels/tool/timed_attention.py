"""Timings of attention, compared with torch's attention on dense tensors of equal sizes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nvfp4_kernels import paged_attention
from nvfp4_kernels.precompile.model import PAGE_SIZE
from nvfp4_kernels.tool.limits import BF16_FLOPS, FP8_FLOPS, Work
from nvfp4_kernels.tool.task import Figures, Machine
from nvfp4_kernels.tool.timed import cold_sets, figures


@dataclass(frozen=True)
class TimedAttention:
    """Causal BF16 attention of sequences of equal length.

    Attributes:
        section: section of the report.
        batch: number of sequences.
        queries: number of queries per sequence, which are the sequence's last tokens.
        keys: number of keys per sequence.
        query_heads, kv_heads, head_dim: sizes of Llama 3 8B.
        fp8: whether the cache is E4M3.
    """

    section: str
    batch: int
    queries: int
    keys: int
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    fp8: bool = False

    @property
    def name(self) -> str:
        heads = f"heads {self.query_heads}/{self.kv_heads}×{self.head_dim}"
        cache = ", FP8 cache" if self.fp8 else ""
        return f"{self.batch} × {self.queries} of {self.keys}, {heads}{cache}"

    @property
    def work(self) -> Work:
        """Work: FLOPs of visible keys; each query, key, value and output moved once."""
        pairs = self.queries * self.keys - self.queries * (self.queries - 1) // 2
        stored = 2 * self.keys * self.kv_heads * self.head_dim * (1 if self.fp8 else 2)
        moved = stored + 2 * 2 * self.queries * self.query_heads * self.head_dim
        flops = 4.0 * pairs * self.query_heads * self.head_dim
        rate = FP8_FLOPS if self.fp8 else BF16_FLOPS
        return Work(self.batch * moved, self.batch * flops, rate)

    def run(self, machine: Machine) -> Figures:
        sets = cold_sets(self.work.nbytes, machine.l2_bytes())
        seen = figures(
            machine.seconds([self._ours(machine.device) for _ in range(sets)]), self.work
        )
        try:
            peers = [self._torch(machine.device) for _ in range(sets)]
            seen["torch us"] = 1e6 * machine.seconds(peers)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            # Some combinations of torch, GPU and shape fail; this is not an error of the task.
            seen["torch us"] = f"none: {str(error).splitlines()[0]}"
        return seen

    def _ours(self, device: torch.device) -> Callable[[], object]:
        pages = -(-self.keys // PAGE_SIZE)
        shape = (self.batch * pages, self.kv_heads, PAGE_SIZE, 2 * self.head_dim)
        cache = torch.randn(shape, device=device, dtype=torch.bfloat16)
        ones = torch.ones((), device=device)
        if self.fp8:
            cache = cache.to(torch.float8_e4m3fn)
        order = torch.randperm(len(cache), device=device).int()
        steps = torch.arange(self.batch + 1, device=device, dtype=torch.int32)
        q = self._random(device, self.batch * self.queries, self.query_heads)
        lens = torch.full((self.batch,), self.keys, device=device, dtype=torch.int32)
        return lambda: paged_attention(
            q, cache, order.view(self.batch, pages), lens, steps * self.queries,
            max_query_len=self.queries, max_seq_len=self.keys,
            k_scale=ones if self.fp8 else None, v_scale=ones if self.fp8 else None,
        )  # fmt: skip

    def _torch(self, device: torch.device) -> Callable[[], object]:
        if self.fp8:
            raise NotImplementedError("torch has no attention with an FP8 cache")
        if self.queries not in (1, self.keys):
            raise NotImplementedError("torch aligns a causal mask with the first key")
        q = self._random(device, self.batch, self.query_heads, self.queries)
        k, v = (self._random(device, self.batch, self.kv_heads, self.keys) for _ in range(2))
        causal = self.queries > 1
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(q, k, v, is_causal=causal, enable_gqa=True)

    def _random(self, device: torch.device, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, self.head_dim, device=device, dtype=torch.bfloat16)


def attention_timings(section: str, quick: bool) -> list[TimedAttention]:
    """Timings of prefill and decode of Llama 3 8B, and of prefill with head dimension 64."""
    sizes = [(1, 4096, 4096), (1, 1, 4096), (64, 1, 4096)]
    if not quick:
        sizes += [(1, 16384, 16384), (4, 512, 8192), (1, 1, 131072), (16, 1, 16384), (256, 1, 2048)]
    timed = [TimedAttention(section, *size) for size in sizes]
    timed += [TimedAttention(section, *size, fp8=True) for size in sizes if size[1] == 1]
    return [*timed, TimedAttention(section, 1, 4096, 4096, 64, 8, 64)]
