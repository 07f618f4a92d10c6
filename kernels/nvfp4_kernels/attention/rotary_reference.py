"""``rotary_attention`` in torch, which is also the CPU kernel: ``rotary_store``, then attention."""

from torch import Tensor

from nvfp4_kernels.attention.call import RotaryCall
from nvfp4_kernels.attention.reference import paged_attention
from nvfp4_kernels.rotary.store.reference import rotary_store


def rotary_attention(call: RotaryCall) -> Tensor:
    """See ``nvfp4_kernels.attention.rotary_op.rotary_attention``; returns the LSE."""
    rotated = call.q.clone()
    end = int(call.query_start[-1])  # rows after the last sequence's have no positions
    rotary_store(
        call.store._replace(
            out=rotated,
            q=call.q[:end],
            k=call.k[:end],
            v=call.v[:end],
            positions=call.positions[:end],
            slot_mapping=call.slot_mapping[:end],
        )
    )
    return paged_attention(call.paged._replace(q=rotated))[1]
