"""The plugin's indexer as called by DeepSeek V4: every fourth token has a key, already cached."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import indexer_quantize_q, indexer_store_k
from tests.test_kernels.indexer.indexer_oracle import quantize
from tests.test_plugin.indexer.indexer_layer import (
    BLOCK_SIZE,
    CACHE,
    HEAD_DIM,
    HEADS,
    MAX_MODEL_LEN,
    Driver,
    Handed,
    Step,
)
from vllm_fp4_plugin.indexer.cache import pages

STEPS: list[Step] = [
    [("a", 3), ("b", 22), ("c", 70)],  # of a there is no key yet
    [("a", 1), ("b", 1), ("c", 1)],
    [("a", 1), ("c", 187)],  # c fills its first page of 64 keys, but for its last two tokens
    [("a", 1), ("b", 1), ("c", 3)],
    [("a", 1), ("b", 1), ("c", 1)],
]


class CompressedLayer(Driver):
    """Driver of ``SparseAttnIndexer`` with random queries and keys."""

    def __init__(
        self, vllm_config: Any, fmt: str, *, ratio: int = 4, top_k: int = 16, next_n: int = 1
    ) -> None:
        from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
        from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache

        vllm_config.cache_config.block_size = BLOCK_SIZE * ratio
        key_bytes = {"fp8": 132, "mxfp4": 68}[fmt]
        cache = DeepseekV4IndexerCache(
            key_bytes, torch.uint8, CACHE, vllm_config.cache_config, compress_ratio=ratio
        )
        self.op = SparseAttnIndexer(
            cache, 128, "ue8m0", top_k, HEAD_DIM, MAX_MODEL_LEN, 20 * MAX_MODEL_LEN,
            torch.empty(800, top_k, dtype=torch.int32), skip_k_cache_insert=True,
            use_fp4_cache=fmt == "mxfp4", compress_ratio=ratio,
        )  # fmt: skip
        assert cache.head_dim == key_bytes
        super().__init__(vllm_config, cache, self.op.topk_indices_buffer, top_k, fmt, next_n)

    def run(self, positions: Tensor, metadata: Any) -> Handed:
        from vllm.forward_context import set_forward_context

        tokens = len(positions)
        q = torch.randn(tokens, HEADS, HEAD_DIM, generator=self.random).bfloat16()
        k = torch.randn(tokens, HEAD_DIM, generator=self.random).bfloat16()
        weights = torch.randn(tokens, HEADS, generator=self.random)
        kv_cache, slots = self.cache_layer.kv_cache, metadata.slot_mapping
        indexer_store_k(k[: len(slots)], pages(kv_cache), slots, self.fmt, kv_cache.shape[1])
        data, scales = indexer_quantize_q(q, self.fmt)
        assert scales is not None
        if self.fmt == "mxfp4":
            queries, folded = (data, scales.view(torch.int32).squeeze(-1)), weights
        else:
            queries, folded = data, weights * scales
        not_to_store = torch.full_like(k, torch.nan)
        self.given = torch.empty(tokens, 1), queries, not_to_store, folded
        with set_forward_context({CACHE: metadata}, self.vllm_config):
            self.op(*self.given)
        return Handed(quantize(self.fmt, q).values, weights, k)


@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
def test_steps(fmt: str, next_n: int, indexer_config: Any) -> None:
    layer = CompressedLayer(indexer_config, fmt, next_n=next_n)
    for step in STEPS:
        layer.step(step)
    layer.step([("a", next_n), ("c", next_n), ("none", 0)], padding=next_n)


def test_compiled(indexer_config: Any) -> None:
    """The graph has a single op, no breaks, and any number of tokens."""
    layer = CompressedLayer(indexer_config, "mxfp4")
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    layer.op = torch.compile(layer.op, backend=backend, fullgraph=True, dynamic=True)
    for step in STEPS:
        layer.step(step)
    assert [str(target) for graph in graphs for target in graph] == ["nvfp4_tc.select_keys"]


@pytest.mark.vllm_ops("fp8_paged_mqa_logits_cpu", "topk_transform_512_cpu")
def test_like_vllm(indexer_config: Any) -> None:
    """The reference is the choice of vLLM's own CPU kernels from the same cache."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

    layer = CompressedLayer(indexer_config, "fp8", ratio=1, top_k=512)
    # Further attributes that vLLM's forward reads.
    vars(layer.op).update(use_fp4_cache=False, dcp_world_size=1, use_pcp=False)
    # vLLM's kernel takes the whole of a prefill at once.
    steps: list[Step] = [[("a", 90), ("b", 520)], [("a", 1), ("b", 1)], [("a", 1), ("b", 20)]]
    for step in steps:
        metadata = layer.step(step)
        ours = layer.buffer.clone()
        layer.buffer.fill_(-7)
        # vLLM's kernel reads the whole table.
        for part in (metadata.decode, *(metadata.prefill.chunks if metadata.prefill else ())):
            if part is not None:
                part.block_table = part.block_table.where(part.block_table < 12, 0)
        with torch.inference_mode(), set_forward_context({CACHE: metadata}, indexer_config):
            SparseAttnIndexer.forward_cpu(layer.op, *layer.given)
        # With positive weights no score is below 0 and many are 0; vLLM may choose any of these.
        weights = layer.given[3][: len(metadata.slot_mapping)]
        rows = (weights < 0).any(1)
        assert rows.any()
        rows = rows.nonzero().flatten()
        assert torch.equal(_sorted(ours[rows]), _sorted(layer.buffer[rows]))


def _sorted(indices: Tensor) -> Tensor:
    return indices.sort(dim=1, descending=True).values
