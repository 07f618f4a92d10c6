"""Launch of ``rotary_store``, from tensors to the kernel's arguments."""

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_layout, check_rows, strides_of
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.rotary.store.call import RotaryStoreCall
from nvfp4_kernels.rotary.store.choose import choose_config
from nvfp4_kernels.rotary.store.kernel import RotaryStore, RotaryStoreArguments
from nvfp4_kernels.rotary.store.pages import PagedCache, TokenHeads
from nvfp4_kernels.rotary.store.tile import PART, Variant
from nvfp4_kernels.runtime.compile import launch


def rotary_store(call: RotaryStoreCall) -> None:
    """See ``nvfp4_kernels.rotary.store.op.rotary_store``.

    Raises:
        InvalidArgument: R is unsupported, or a tensor is misaligned.
    """
    q, k, table = call.q, call.k, call.cos_sin_cache
    facts = device_facts(q.device)
    check_layouts(call, facts.arch)
    check_layout("out", call.out)
    tokens, rotary_dim = len(call.slot_mapping), table.shape[1]
    if not tokens:
        return
    tile = choose_config(tokens, q.shape[1], k.shape[1], q.shape[2], rotary_dim, facts.sms)
    arguments = RotaryStoreArguments(
        q=token_heads(q),
        k=token_heads(k),
        v=token_heads(call.v),
        out=call.out,
        cache=PagedCache(call.kv_cache, *strides_of(call.kv_cache)[:3]),
        positions=call.positions,
        slots=call.slot_mapping,
        table=table,
        q_norm=call.q_norm,
        k_norm=call.k_norm,
        k_scale=call.k_scale,
        v_scale=call.v_scale,
        eps=0.0 if call.eps is None else call.eps,
        tokens=tokens,
    )
    launch(RotaryStore(tile, store_variant(call)), arguments)


def token_heads(x: Tensor) -> TokenHeads:
    """Kernel argument for ``x`` ``(T, H, D)``: address and strides."""
    return TokenHeads(x, *strides_of(x)[:2])


def store_variant(call: RotaryStoreCall) -> Variant:
    """Compile-time variant of the kernel for a call."""
    norm = call.q_norm if call.q_norm is not None else call.k_norm
    return Variant(
        dtype=dtype_name(call.q.dtype),
        table_dtype=dtype_name(call.cos_sin_cache.dtype),
        position_dtype=dtype_name(call.positions.dtype),
        page_size=call.kv_cache.shape[2],
        neox=call.neox,
        fp8=call.kv_cache.dtype == torch.float8_e4m3fn,
        q_norm=call.q_norm is not None,
        k_norm=call.k_norm is not None,
        norm_dtype=dtype_name(call.q.dtype if norm is None else norm.dtype),
    )


def check_layouts(call: RotaryStoreCall, arch: str) -> None:
    """Raise unless a kernel supports R, and can access heads, cache, angles and norms' weights.

    ``out`` is not checked.

    Args:
        call: arguments of the op.
        arch: name of the architecture, for error messages.

    Raises:
        InvalidArgument: R is unsupported, or a tensor is misaligned.
    """
    rotary_dim = call.cos_sin_cache.shape[1]
    if rotary_dim % PART:
        raise InvalidArgument(
            f"cos_sin_cache: R is {rotary_dim}, must be a multiple of {PART} on {arch}; use "
            "vLLM's own rotary embedding"
        )
    check_rows(arch, q=call.q, k=call.k, v=call.v, kv_cache=call.kv_cache)
    check_layout("cos_sin_cache", call.cos_sin_cache)
    check_layout("q_norm", call.q_norm)
    check_layout("k_norm", call.k_norm)
