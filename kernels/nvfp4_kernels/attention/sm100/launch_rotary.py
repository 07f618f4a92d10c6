"""Launch of the attention kernel on sm_100 for ``rotary_attention``."""

from torch import Tensor

from nvfp4_kernels.attention.call import RotaryCall
from nvfp4_kernels.attention.sm100.launch import Rotating, paged_attention
from nvfp4_kernels.attention.sm100.rotating import RotationArguments
from nvfp4_kernels.attention.sm100.tile import Rotation
from nvfp4_kernels.checks import strides_of
from nvfp4_kernels.devices import device_facts
from nvfp4_kernels.rotary.store.launch import check_layouts, store_variant, token_heads
from nvfp4_kernels.rotary.store.pages import PagedCache
from nvfp4_kernels.rotary.store.tile import HeadTile


def rotary_attention(call: RotaryCall) -> Tensor:
    """See ``nvfp4_kernels.attention.rotary_op.rotary_attention``; returns the LSE.

    Raises:
        InvalidArgument: see ``paged_attention`` and ``rotary_store``.
    """
    store = call.store
    check_layouts(store, device_facts(call.q.device).arch)
    arguments = RotationArguments(
        new_k=token_heads(call.k),
        new_v=token_heads(call.v),
        cache=PagedCache(call.kv_cache, *strides_of(call.kv_cache)[:3]),
        slots=call.slot_mapping,
        table=call.cos_sin_cache,
        q_norm=call.q_norm,
        k_norm=call.k_norm,
        eps=0.0 if call.eps is None else call.eps,
        settled=int(call.settled),
    )
    head = HeadTile(call.q.shape[2], call.cos_sin_cache.shape[1])
    rotating = Rotating(Rotation(head, store_variant(store)), arguments)
    return paged_attention(call.paged, rotating)[1]
