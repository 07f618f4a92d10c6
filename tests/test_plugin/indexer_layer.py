"""A tiny layer like DeepSeek V3.2's, driven over a paged cache as vLLM drives it, and an oracle.

Metadata come from vLLM's own builder. Two of its Triton kernels, which no CPU runs, are here again,
written from what they compute.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.test_kernels.indexer_oracle import dequantize, quantize, scores
from tests.test_kernels.oracle import Float64

BLOCK_SIZE, PAGES = 64, 12
HEADS, HEAD_DIM, ROTATED, HIDDEN, LORA = 4, 128, 64, 32, 48
MAX_MODEL_LEN, MAX_TOKENS = 512, 400
UNTOUCHED = 7
PREFIX = "model.layers.0.self_attn.indexer"
CACHE = f"{PREFIX}.k_cache"
# A step adds some tokens to each of some sequences: decodes first, as vLLM sorts them.
Step = list[tuple[str, int]]


def prefill_bounds(
    query_start: Tensor, seq_lens: Tensor, key_start: Tensor, row_start: Tensor,
    token_to_seq: Tensor, ks: Tensor, ke: Tensor, start: int, stop: int, *_: int,
    num_reqs: int, COMPRESS_RATIO: int,
) -> None:  # fmt: skip
    """What each query of a prefill sees, of its sequence's keys, which lie side by side."""
    for sequence in range(num_reqs):
        first, end = int(query_start[sequence]), int(query_start[sequence + 1])
        for token in range(max(first, start), min(end, stop)):
            ks[token - start] = row_start[sequence]
            position = int(seq_lens[sequence]) - (end - token)
            ke[token - start] = row_start[sequence] + (position + 1) // COMPRESS_RATIO


def quantize_fp8(x: Tensor, group_size: int, **_: bool) -> tuple[Tensor, Tensor]:
    """Rows to FP8, and their scales, powers of two."""
    found = quantize("fp8", x)
    assert x.shape[-1] == group_size
    assert found.scales is not None
    return found.data, found.scales.unsqueeze(-1)


@contextmanager
def forwarding(metadata: Any, vllm_config: Any) -> Iterator[None]:
    from vllm.forward_context import set_forward_context

    with set_forward_context(metadata, vllm_config):
        yield


@dataclass
class Sequence:
    """A request: its pages, and what the layer made of its tokens so far."""

    pages: list[int] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)


@dataclass
class Seen:
    """What the layer handed to the op: queries and their weights, in 16 bits or FP8."""

    q: Tensor
    k: Tensor
    weights: Tensor


class Layer:
    """vLLM's side: the layer, its cache, pages, slots and metadata."""

    def __init__(
        self, vllm_config: Any, fmt: str | None, top_k: int = 16, next_n: int = 1, wider: int = 0
    ) -> None:
        from vllm.model_executor.models import deepseek_v2

        from vllm_fp4_plugin.indexer.layer import UnquantizedIndexer

        if fmt is not None:
            vllm_config.additional_config = {"nvfp4_tc": {"indexer_format": fmt}}
        self.vllm_config, self.fmt, self.top_k = vllm_config, fmt or "fp8", top_k
        traits = SimpleNamespace(
            index_topk=top_k, index_n_heads=HEADS, index_head_dim=HEAD_DIM,
            qk_rope_head_dim=ROTATED,
        )  # fmt: skip
        self.buffer = torch.full((MAX_TOKENS, top_k + wider), UNTOUCHED, dtype=torch.int32)
        self.indexer = deepseek_v2.Indexer(
            vllm_config, traits, HIDDEN, LORA, None, vllm_config.cache_config, self.buffer,
            prefix=PREFIX,
        )  # fmt: skip
        if self.fmt != "fp8":
            self.indexer.__class__ = UnquantizedIndexer
        self.random = torch.Generator().manual_seed(1)
        for weight in self.indexer.parameters():
            weight.data.copy_(torch.randn(weight.shape, generator=self.random) * 0.3)
        for linear in (self.indexer.wq_b, self.indexer.wk_weights_proj):
            linear.quant_method.process_weights_after_loading(linear)
        self.rope = _rope()
        self.spec = self.indexer.k_cache.get_kv_cache_spec(vllm_config)
        self.indexer.k_cache.kv_cache = _allocate(self.spec)
        self.next_n = next_n
        self.builder = _builder(self.spec, vllm_config, next_n)
        self.sequences: dict[str, Sequence] = {}
        self.free = list(range(PAGES - 1, 0, -2)) + list(range(0, PAGES, 2))
        self.seen: list[Seen] = []
        self._spy()

    def _spy(self) -> None:
        run = self.indexer.indexer_op.forward

        def forward(hidden: Tensor, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
            self.seen.append(Seen(q, k, weights))
            return run(hidden, q, k, weights)

        self.indexer.indexer_op.forward = forward

    def step(self, step: Step, padding: int = 0, disturb: Any = None) -> Any:
        """Run a step; ``padding`` more tokens and slots come after the last, as in a CUDA graph."""
        tokens = sum(count for _, count in step)
        metadata = self.metadata(step)
        if disturb is not None:
            disturb(metadata)
        hidden = torch.randn(tokens + padding, HIDDEN, generator=self.random).bfloat16()
        qr = torch.randn(tokens + padding, LORA, generator=self.random).bfloat16()
        positions = torch.cat([self._positions(*part) for part in step])
        positions = torch.cat([positions, torch.zeros(padding, dtype=torch.int64)])
        self.buffer.fill_(UNTOUCHED)
        with torch.inference_mode(), forwarding({CACHE: metadata}, self.vllm_config):
            out = self.indexer(hidden, qr, positions, self.rope)
        assert out is self.buffer
        row = 0
        for name, count in step:
            self.sequences[name].keys.extend(self.seen[-1].k[row : row + count])
            row += count
        return metadata

    def metadata(self, step: Step) -> Any:
        """As vLLM's builder makes it, once the sequences have grown."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        counts = torch.tensor([0, *(count for _, count in step)])
        query_start = counts.cumsum(0).to(torch.int32)
        lens, slots = [], []
        table = torch.full((len(step), PAGES), 1 << 30, dtype=torch.int32)
        for row, (name, count) in enumerate(step):
            sequence = self.sequences.setdefault(name, Sequence())
            length = len(sequence.keys) + count
            while len(sequence.pages) * BLOCK_SIZE < length:
                sequence.pages.append(self.free.pop())
            table[row, : len(sequence.pages)] = torch.tensor(sequence.pages)
            lens.append(length)
            for position in range(length - count, length):
                page = sequence.pages[position // BLOCK_SIZE]
                slots.append(page * BLOCK_SIZE + position % BLOCK_SIZE)
        seq_lens = torch.tensor(lens, dtype=torch.int32)
        return self.builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=query_start, query_start_loc_cpu=query_start, seq_lens=seq_lens,
                num_reqs=len(step), num_actual_tokens=int(query_start[-1]),
                max_query_len=max(count for _, count in step), max_seq_len=max(lens),
                block_table_tensor=table, slot_mapping=torch.tensor(slots),
                seq_lens_cpu_upper_bound=seq_lens,
            ),
        )  # fmt: skip

    def _positions(self, name: str, count: int) -> Tensor:
        start = len(self.sequences[name].keys)
        return torch.arange(start, start + count)

    def check(self, step: Step) -> None:
        """The buffer after a step, against scores in float64 of what the layer handed out."""
        row = 0
        for name, count in step:
            keys = quantize(self.fmt, torch.stack(self.sequences[name].keys)).values
            for back in range(count, 0, -1):
                context = len(keys) - back + 1
                expected = self._scores(row, keys[:context])
                check_row(self.buffer[row], expected, self.top_k)
                row += 1

    def _scores(self, row: int, keys: Float64) -> Float64:
        q, weights = self.seen[-1].q[row], self.seen[-1].weights[row].double().numpy()
        if q.dtype == torch.bfloat16:
            values = quantize(self.fmt, q).values
        else:  # with its scales in the weights
            values = dequantize("fp8", q, torch.ones(HEADS))
        return scores(values, keys, weights)


def check_row(row: Tensor, expected: Float64, top_k: int) -> None:
    """As many different keys as there are, ascending, none of them worse than one left out."""
    count = min(top_k, len(expected))
    chosen = row[:count].tolist()
    assert chosen == sorted(set(chosen)), chosen
    assert chosen[0] >= 0, chosen
    assert chosen[-1] < len(expected), chosen
    assert (row[count:] == -1).all(), row[count:]
    # The op's sums are float32; two scores as close as that may change places.
    rounding = 1e-5 * np.abs(expected).max()
    left_out = np.delete(expected, chosen)
    if len(left_out):
        assert expected[chosen].min() >= left_out.max() - rounding


def _rope() -> Any:
    from vllm.model_executor.layers.rotary_embedding import get_rope

    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    return get_rope(ROTATED, max_position=MAX_MODEL_LEN, rope_parameters=parameters)


def _allocate(spec: Any) -> Tensor:
    """Pages of garbage, the bytes that are NaN in every format, with gaps between them."""
    size = spec.page_size_bytes
    memory = torch.full((PAGES, size + 32), 0xFF, dtype=torch.uint8)
    return memory[:, :size].unflatten(1, (BLOCK_SIZE, spec.head_size))


def _builder(spec: Any, vllm_config: Any, next_n: int) -> Any:
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder

    builder = DeepseekV32IndexerMetadataBuilder(
        spec, [CACHE], vllm_config, torch.device("cpu"), block_table_width=PAGES
    )
    # As with --speculative-config of one token less.
    builder.decode_threshold, builder.num_speculative_tokens = next_n, next_n - 1
    builder.offsets_buffer = torch.arange(next_n, dtype=torch.int32)
    return builder
