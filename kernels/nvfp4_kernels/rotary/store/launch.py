"""Launch of ``rotary_store``, from tensors to the kernel's arguments."""

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_layout, check_rows, strides_of
from nvfp4_kernels.devices import device_arch, dtype_name, multiprocessors
from nvfp4_kernels.rotary.store.choose import choose_config
from nvfp4_kernels.rotary.store.kernel import RotaryStore, RotaryStoreArguments
from nvfp4_kernels.rotary.store.pages import PagedCache, TokenHeads
from nvfp4_kernels.rotary.store.tile import PART, Variant
from nvfp4_kernels.runtime.compile import launch


def rotary_store(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    neox: bool,
    eps: float | None,
) -> None:
    """See ``nvfp4_kernels.rotary.store.op.rotary_store``.

    Raises:
        InvalidArgument: an unsupported R, or rows that are misaligned.
    """
    check_layouts(q, k, v, kv_cache, cos_sin_cache, q_norm, k_norm)
    check_layout("out", out)
    tokens, rotary_dim = len(slot_mapping), cos_sin_cache.shape[1]
    if not tokens:
        return
    tile = choose_config(
        tokens, q.shape[1], k.shape[1], q.shape[2], rotary_dim, multiprocessors(q.device)
    )
    variant = store_variant(q, positions.dtype, cos_sin_cache, kv_cache, q_norm, k_norm, neox)
    arguments = RotaryStoreArguments(
        q=token_heads(q),
        k=token_heads(k),
        v=token_heads(v),
        out=out,
        cache=PagedCache(kv_cache, *strides_of(kv_cache)[:3]),
        positions=positions,
        slots=slot_mapping,
        table=cos_sin_cache,
        q_norm=q_norm,
        k_norm=k_norm,
        k_scale=k_scale,
        v_scale=v_scale,
        eps=0.0 if eps is None else eps,
        tokens=tokens,
    )
    launch(RotaryStore(tile, variant), arguments)


def token_heads(x: Tensor) -> TokenHeads:
    """``x`` ``(T, H, D)`` as a kernel addresses it."""
    return TokenHeads(x, *strides_of(x)[:2])


def store_variant(
    q: Tensor,
    positions: torch.dtype,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    neox: bool,
) -> Variant:
    """Data types and steps of a call."""
    norm = q_norm if q_norm is not None else k_norm
    return Variant(
        dtype=dtype_name(q.dtype),
        table_dtype=dtype_name(cos_sin_cache.dtype),
        position_dtype=dtype_name(positions),
        page_size=kv_cache.shape[2],
        neox=neox,
        fp8=kv_cache.dtype == torch.float8_e4m3fn,
        q_norm=q_norm is not None,
        k_norm=k_norm is not None,
        norm_dtype=dtype_name(q.dtype if norm is None else norm.dtype),
    )


def check_layouts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    cos_sin_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
) -> None:
    """Raise unless a kernel can access the tensors.

    Raises:
        InvalidArgument: an unsupported R, or rows that are misaligned.
    """
    rotary_dim, arch = cos_sin_cache.shape[1], device_arch(q.device)
    if rotary_dim % PART:
        raise InvalidArgument(
            f"cos_sin_cache: R is {rotary_dim}, must be a multiple of {PART} on {arch}; use "
            "vLLM's own rotary embedding"
        )
    check_rows(arch, q=q, k=k, v=v, kv_cache=kv_cache)
    for name, x in (("cos_sin_cache", cos_sin_cache), ("q_norm", q_norm), ("k_norm", k_norm)):
        check_layout(name, x)
