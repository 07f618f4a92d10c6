"""``decode_attention`` in torch, which is also the CPU kernel: a store, then attention."""

from dataclasses import replace

import torch

from nvfp4_kernels.attention.decode.call import DecodeCall
from nvfp4_kernels.attention.reference import PagedKeyValues, attend
from nvfp4_kernels.rotary.store.reference import stored


def decode_attention(call: DecodeCall) -> None:
    """See ``nvfp4_kernels.attention.decode.op.decode_attention``."""
    kv_cache, table, scoring = call.kv_cache, call.block_table, call.scoring
    new = torch.cat([stored(call.key, call.k_scale), stored(call.value, call.v_scale)], -1)
    cache = kv_cache
    if call.k_scale is not None:
        scoring = replace(scoring, scale=scoring.scale * call.k_scale.item())
        cache = kv_cache.view(torch.uint8)
    size, lengths = kv_cache.shape[2], call.seq_lens.tolist()
    restored = []
    for sequence, length in enumerate(lengths):
        if length:
            page = table[sequence, (length - 1) // size]
            slot = cache[page, :, (length - 1) % size]
            if call.slot_mapping[sequence] < 0:
                restored.append((slot, slot.clone()))
            slot.copy_(new[sequence])
    starts, key_values = range(len(lengths) + 1), PagedKeyValues(kv_cache, table)
    attend(
        call.q, key_values, starts, lengths, call.sinks, scoring, v_scale=call.v_scale, out=call.out
    )
    for slot, content in restored:
        slot.copy_(content)
