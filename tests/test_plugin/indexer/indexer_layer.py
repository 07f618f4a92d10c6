"""Driver that runs layers with the plugin's indexer as vLLM does, and checks them by an oracle.

The metadata come from vLLM's own builder. Its Triton kernels, and those of the layers, cannot run
on a CPU and are reimplemented here from their formulas.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.test_kernels.indexer.indexer_oracle import quantize, scores
from tests.test_kernels.oracle import Float64

BLOCK_SIZE, PAGES, MAX_MODEL_LEN = 64, 12, 640
HEADS, HEAD_DIM, ROTATED, HIDDEN, LORA = 4, 128, 64, 32, 48
UNTOUCHED = 7
PREFIX = "model.layers.0.self_attn.indexer"
CACHE = f"{PREFIX}.k_cache"
# Numbers of tokens that a step adds to sequences: decodes first, as vLLM sorts them.
Step = list[tuple[str, int]]


def prefill_bounds(
    query_start: Tensor, seq_lens: Tensor, key_start: Tensor, row_start: Tensor,
    token_to_seq: Tensor, ks: Tensor, ke: Tensor, start: int, stop: int, *_: int,
    num_reqs: int, COMPRESS_RATIO: int,
) -> None:  # fmt: skip
    """Write the ends ``ks``, ``ke`` of the keys that each query of a prefill sees.

    The keys of a sequence are contiguous; ``start`` and ``stop`` delimit the queries.
    """
    for sequence in range(num_reqs):
        first, end = int(query_start[sequence]), int(query_start[sequence + 1])
        for token in range(max(first, start), min(end, stop)):
            ks[token - start] = row_start[sequence]
            position = int(seq_lens[sequence]) - (end - token)
            ke[token - start] = row_start[sequence] + (position + 1) // COMPRESS_RATIO


def compressed_slots(
    out: Tensor, slots: Tensor, query_start: Tensor, seq_lens: Tensor, block_table: Tensor,
    block_size: int, ratio: int, *_: int,
) -> None:  # fmt: skip
    """Write cache slots of the last of every ``ratio`` tokens to ``out``; others have no slot."""
    for sequence, length in enumerate(seq_lens.tolist()):
        first, end = query_start[sequence : sequence + 2].tolist()
        for token in range(first, end):
            state, place = divmod(length - (end - token), ratio)
            if place == ratio - 1 and slots[token] >= 0:
                page = int(block_table[sequence, state // block_size])
                out[token] = page * block_size + state % block_size


def quantize_fp8(x: Tensor, group_size: int, **_: bool) -> tuple[Tensor, Tensor]:
    """Rows quantised to FP8, and their power-of-two scales."""
    found = quantize("fp8", x)
    assert x.shape[-1] == group_size
    assert found.scales is not None
    return found.data, found.scales.unsqueeze(-1)


@dataclass(frozen=True)
class Handed:
    """Tensors that a model's layer passes to the indexer in a step.

    Attributes:
        q: decoded queries, float64 ``(T, H, D)``.
        weights: weights of the heads ``(T, H)``.
        keys: keys, bfloat16 ``(T, D)``.
    """

    q: Float64
    weights: Tensor
    keys: Tensor


@dataclass
class Sequence:
    """Request, with its number of tokens, pages and keys."""

    tokens: int = 0
    pages: list[int] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)


class Driver:
    """Driver in place of vLLM: pages, slots, metadata, and the keys for the oracle.

    Args:
        vllm_config: config of the engine.
        cache_layer: layer that represents the cache.
        buffer: output of the indexer, int32.
        top_k: number of keys that the indexer chooses.
        fmt: format of the keys.
        next_n: largest number of tokens in a decode.
    """

    def __init__(
        self, vllm_config: Any, cache_layer: Any, buffer: Tensor, top_k: int, fmt: str,
        next_n: int = 1,
    ) -> None:  # fmt: skip
        self.vllm_config, self.cache_layer, self.buffer = vllm_config, cache_layer, buffer
        self.top_k, self.fmt = top_k, fmt
        self.random = torch.Generator().manual_seed(1)
        spec = cache_layer.get_kv_cache_spec(vllm_config)
        self.ratio, self.block_size = spec.tokens_per_state, spec.num_states
        cache_layer.bind_kv_cache(_allocate(spec))
        self.builder = _builder(spec, vllm_config, next_n)
        self.sequences: dict[str, Sequence] = {}
        self.free = list(range(PAGES - 1, 0, -2)) + list(range(0, PAGES, 2))

    def run(self, positions: Tensor, metadata: Any) -> Handed:
        """Run the layer on the tokens at ``positions``."""
        raise NotImplementedError

    def step(
        self, step: Step, padding: int = 0, disturb: Callable[[Any], None] = lambda _: None
    ) -> Any:
        """Compute and check a step; ``padding`` tokens follow, as in a CUDA graph."""
        metadata = self.metadata(step)
        disturb(metadata)
        positions = [torch.arange(self.sequences[n].tokens)[-count:] for n, count in step if count]
        self.buffer.fill_(UNTOUCHED)
        with torch.inference_mode():
            handed = self.run(torch.cat([*positions, torch.zeros(padding, dtype=int)]), metadata)
        row = 0
        for name, count in step:
            sequence = self.sequences[name]
            for position in range(sequence.tokens - count, sequence.tokens):
                if (position + 1) % self.ratio == 0:
                    sequence.keys.append(handed.keys[row])
                row += 1
        self._check(step, handed)
        assert (self.buffer[row : row + padding] == -1).all()
        assert (self.buffer[row + padding :] == UNTOUCHED).all()
        return metadata

    def metadata(self, step: Step) -> Any:
        """Add a step's tokens to the sequences; returns the metadata from vLLM's builder."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        counts = torch.tensor([0, *(count for _, count in step)])
        query_start = counts.cumsum(0).to(torch.int32)
        slots = []
        # Table entries after a sequence's last page are arbitrary.
        table = torch.full((len(step), PAGES), 1 << 30, dtype=torch.int32)
        for row, (name, count) in enumerate(step):
            sequence = self.sequences.setdefault(name, Sequence())
            sequence.tokens += count
            while len(sequence.pages) * self.block_size * self.ratio < sequence.tokens:
                sequence.pages.append(self.free.pop())
            table[row, : len(sequence.pages)] = torch.tensor(sequence.pages)
            for position in range(sequence.tokens - count, sequence.tokens):
                page = sequence.pages[position // self.block_size // self.ratio]
                slots.append(page * self.block_size + position % self.block_size)
        lens = [self.sequences[name].tokens for name, _ in step]
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

    def _check(self, step: Step, handed: Handed) -> None:
        row = 0
        for name, count in step:
            sequence, keys = self.sequences[name], np.zeros((0, HEAD_DIM))
            if sequence.keys:
                keys = quantize(self.fmt, torch.stack(sequence.keys)).values
            for position in range(sequence.tokens - count, sequence.tokens):
                seen = keys[: (position + 1) // self.ratio]
                expected = scores(handed.q[row], seen, handed.weights[row].double().numpy())
                check_row(self.buffer[row], expected, self.top_k)
                row += 1


def check_row(row: Tensor, expected: Float64, top_k: int) -> None:
    """Check the top-k of a row: distinct, ascending, -1 beyond the keys, no better key left out."""
    count = min(top_k, len(expected))
    chosen = row[:count].tolist()
    assert chosen == sorted(set(chosen)), chosen
    assert all(0 <= key < len(expected) for key in chosen), chosen
    assert (row[count:] == -1).all(), row[count:]
    left_out = np.delete(expected, chosen)
    if len(left_out):
        # The op sums in float32; two scores this close may change places.
        rounding = 1e-5 * np.abs(expected).max()
        assert expected[chosen].min() >= left_out.max() - rounding


def _allocate(spec: Any) -> Tensor:
    """Cache pages filled with bytes that are NaN in every format, with gaps between the pages."""
    page_bytes = spec.num_states * spec.head_size
    memory = torch.full((PAGES, page_bytes + 64), 0xFF, dtype=torch.uint8)
    return memory[:, :page_bytes].view(PAGES, 1, spec.num_states, spec.head_size)


def _builder(spec: Any, vllm_config: Any, next_n: int) -> Any:
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder

    builder = DeepseekV32IndexerMetadataBuilder(
        spec, [CACHE], vllm_config, torch.device("cpu"), block_table_width=PAGES
    )
    # The threshold is that of a speculative config with one token less.
    builder.decode_threshold, builder.num_speculative_tokens = next_n, next_n - 1
    builder.offsets_buffer = torch.arange(next_n, dtype=torch.int32)
    return builder
