"""``decode_attention`` in torch, which is also the CPU kernel: a store, then attention."""

import torch

from nvfp4_kernels.attention.decode.call import DecodeCall
from nvfp4_kernels.attention.reference import PagedKeyValues, attend


def decode_attention(call: DecodeCall) -> None:
    """See ``nvfp4_kernels.attention.decode.op.decode_attention``."""
    kv_cache, table = call.kv_cache, call.block_table
    size, lengths = kv_cache.shape[2], call.seq_lens.tolist()
    restored = []
    for sequence, length in enumerate(lengths):
        if length:
            page = table[sequence, (length - 1) // size]
            slot = kv_cache[page, :, (length - 1) % size]
            if call.slot_mapping[sequence] < 0:
                restored.append((slot, slot.clone()))
            slot.copy_(torch.cat([call.key[sequence], call.value[sequence]], -1))
    starts, key_values = range(len(lengths) + 1), PagedKeyValues(kv_cache, table)
    attend(call.q, key_values, starts, lengths, call.sinks, call.scoring, out=call.out)
    for slot, content in restored:
        slot.copy_(content)
