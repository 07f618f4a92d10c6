"""FP8 against vLLM's kernels for CPU: the bytes of queries and keys, scores, and top-k."""

import pytest
import torch
from torch import Tensor
from vllm import _custom_ops as vllm_ops

from nvfp4_kernels import (
    IndexerPagedKeys,
    indexer_logits,
    indexer_quantize_q,
    indexer_store_k,
    indexer_topk,
)
from tests.test_kernels.bits import check_equal

HEAD_DIM, BLOCK_SIZE, KEY_BYTES = 128, 64, 132
ROTATED = 64
# Cosines, then sines, of a rotation by zero.
NO_ROTATION = torch.cat([torch.ones(8, ROTATED // 2), torch.zeros(8, ROTATED // 2)], dim=1)


def vectors(*shape: int) -> Tensor:
    """Vectors with magnitudes octaves apart, some zero elements and some zero vectors."""
    x = torch.randn(*shape, HEAD_DIM) * 2.0 ** torch.randint(-20, 12, (*shape, 1))
    x[torch.rand(x.shape) < 0.1] = 0
    x[torch.rand(shape) < 0.05] = 0
    return x.bfloat16()


def quantize_q(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 queries from vLLM, and the weights times their scales."""
    data, folded = torch.empty(q.shape, dtype=torch.float8_e4m3fn), torch.empty(q.shape[:2])
    vllm_ops.fused_indexer_q_rope_quant_cpu(
        torch.zeros(len(q), dtype=torch.int64), q.float(), NO_ROTATION, data, weights, 1.0, 1.0,
        folded,
    )  # fmt: skip
    return data, folded


def store_k(k: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store keys by vLLM's kernel, one by one.

    The state holds a key's signs, and the norm's weights are its magnitudes. Only the last of a
    window of eight tokens exists, and its state is the second half of 256 elements, so that pooling
    changes nothing; its mean square is 1, so that the norm changes nothing.
    """
    slots_of_window = torch.tensor([[-1] * 7 + [0]])
    for key, slot in zip(k.float(), slots, strict=True):
        state = torch.zeros(1, 1, 4 * HEAD_DIM)
        state[0, 0, HEAD_DIM : 2 * HEAD_DIM] = torch.where(torch.signbit(key), -1.0, 1.0)
        vllm_ops.compress_norm_rope_store_indexer_cpu(
            state, slots_of_window, torch.tensor([3]), slot.view(1), key.abs(), 0.0, NO_ROTATION,
            cache, BLOCK_SIZE, 4,
        )  # fmt: skip


@pytest.mark.vllm_ops("fused_indexer_q_rope_quant_cpu")
def test_queries() -> None:
    q, weights = vectors(20, 64), torch.randn(20, 64)
    data, folded = quantize_q(q, weights)
    ours, scales = indexer_quantize_q(q, "fp8")
    assert scales is not None
    check_equal([ours, weights * scales], [data, folded])


@pytest.mark.vllm_ops("compress_norm_rope_store_indexer_cpu")
def test_keys() -> None:
    """Caches are equal in every byte."""
    k, slots = vectors(60), torch.randperm(3 * BLOCK_SIZE)[:60]
    slots[7] = -1
    theirs = torch.full((3, BLOCK_SIZE * KEY_BYTES), 0xA5, dtype=torch.uint8)
    ours = theirs.clone()
    store_k(k, theirs, slots)
    indexer_store_k(k, ours, slots, "fp8", BLOCK_SIZE)
    assert torch.equal(ours, theirs)


@pytest.mark.vllm_ops("fused_indexer_q_rope_quant_cpu", "fp8_paged_mqa_logits_cpu")
@pytest.mark.parametrize("heads", [8, 64])
def test_scores(heads: int) -> None:
    lens = torch.tensor([1, 63, 64, 65, 200, 256], dtype=torch.int32)
    q, k = torch.randn(6, heads, HEAD_DIM).bfloat16(), torch.randn(256, HEAD_DIM).bfloat16()
    weights = torch.randn(6, heads)
    cache = torch.full((9, BLOCK_SIZE * KEY_BYTES), 0xFF, dtype=torch.uint8)
    table = torch.tensor([[5, 1, 7, 2]], dtype=torch.int32).repeat(6, 1)
    slots = table[0].long().unsqueeze(1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
    indexer_store_k(k, cache, slots.flatten(), "fp8", BLOCK_SIZE)
    data, folded = quantize_q(q, weights)
    arguments = (cache, folded, lens, table, BLOCK_SIZE, 256)
    theirs = vllm_ops.fp8_paged_mqa_logits_cpu(data, *arguments)
    pages = IndexerPagedKeys(cache, lens.unsqueeze(1), table, 256, BLOCK_SIZE)
    ours = indexer_logits(data.unsqueeze(1), None, pages, folded, "fp8")
    keys, scales = indexer_quantize_q(k.unsqueeze(1), "fp8")
    assert scales is not None
    values = keys.squeeze(1).float() * scales
    # Twice the bound of a float32 sum of D products and H heads, in any order.
    products = data.float().abs() @ values.abs().T
    bound = 2 * (HEAD_DIM + heads) * 2.0**-24 * (folded.abs().unsqueeze(1) @ products).squeeze(1)
    seen = torch.arange(256) < lens.unsqueeze(1)
    assert ((ours - theirs).abs() <= bound)[seen].all()
    assert (ours == -torch.inf)[~seen].all()


@pytest.mark.vllm_ops("topk_transform_512_cpu")
def test_top_k() -> None:
    """Top-k has the same keys; vLLM's order for short rows is ours for all rows."""
    logits = torch.randn(4, 3000)
    lens = torch.tensor([3000, 511, 512, 700], dtype=torch.int32)
    pages = torch.arange(47, dtype=torch.int32).expand(4, -1).contiguous()
    theirs, slots = torch.empty(2, 4, 512, dtype=torch.int32)
    vllm_ops.topk_transform_512_cpu(logits, lens, pages, slots, 64, theirs)
    ours, _ = indexer_topk(logits, lens, 512)
    assert torch.equal(ours.sort().values, theirs.sort().values)
    assert torch.equal(ours[1:3], theirs[1:3])
