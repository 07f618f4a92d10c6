"""``decode_attention`` in torch, a store and then attention: the formula, and the CPU kernel."""

import torch
from torch import Tensor

from nvfp4_kernels.attention.reference import PagedKeyValues, attend
from nvfp4_kernels.attention.scoring import Scoring


def decode_attention(
    out: Tensor,
    q: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    sinks: Tensor | None,
    scoring: Scoring,
) -> None:
    """See ``nvfp4_kernels.attention.decode.op.decode_attention``."""
    size, lengths = kv_cache.shape[2], seq_lens.tolist()
    restored = []
    for sequence, length in enumerate(lengths):
        if length:
            page = block_table[sequence, (length - 1) // size]
            slot = kv_cache[page, :, (length - 1) % size]
            if slot_mapping[sequence] < 0:
                restored.append((slot, slot.clone()))
            slot.copy_(torch.cat([key[sequence], value[sequence]], -1))
    starts = range(len(lengths) + 1)
    attend(q, PagedKeyValues(kv_cache, block_table), starts, lengths, sinks, scoring, out=out)
    for slot, content in restored:
        slot.copy_(content)
