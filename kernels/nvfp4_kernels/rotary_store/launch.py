"""Launch of ``rotary_store``, from tensors to the kernel's arguments."""

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_layout, check_rows, strides_of
from nvfp4_kernels.compile import launch
from nvfp4_kernels.devices import device_arch, dtype_name, multiprocessors
from nvfp4_kernels.rotary_store.choose import choose_config
from nvfp4_kernels.rotary_store.kernel import (
    PagedCache,
    RotaryStore,
    RotaryStoreArguments,
    TokenHeads,
)
from nvfp4_kernels.rotary_store.tile import PART, Variant


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
    """See ``nvfp4_kernels.rotary_store.op.rotary_store``.

    Raises:
        InvalidArgument: an unsupported R, or rows that are misaligned.
    """
    tokens, rotary_dim, arch = len(slot_mapping), cos_sin_cache.shape[1], device_arch(q.device)
    if rotary_dim % PART:
        raise InvalidArgument(
            f"cos_sin_cache: R is {rotary_dim}, must be a multiple of {PART} on {arch}; use "
            "vLLM's own rotary embedding"
        )
    check_rows(arch, q=q, k=k, v=v, kv_cache=kv_cache)
    for name, x in (
        ("cos_sin_cache", cos_sin_cache), ("q_norm", q_norm), ("k_norm", k_norm), ("out", out),
    ):  # fmt: skip
        check_layout(name, x)
    if not tokens:
        return
    tile = choose_config(
        tokens, q.shape[1], k.shape[1], q.shape[2], rotary_dim, multiprocessors(q.device)
    )
    norm = q_norm if q_norm is not None else k_norm
    variant = Variant(
        dtype=dtype_name(q.dtype),
        table_dtype=dtype_name(cos_sin_cache.dtype),
        position_dtype=dtype_name(positions.dtype),
        page_size=kv_cache.shape[2],
        neox=neox,
        fp8=kv_cache.dtype == torch.float8_e4m3fn,
        q_norm=q_norm is not None,
        k_norm=k_norm is not None,
        norm_dtype=dtype_name(q.dtype if norm is None else norm.dtype),
    )
    arguments = RotaryStoreArguments(
        q=_heads(q),
        k=_heads(k),
        v=_heads(v),
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


def _heads(x: Tensor) -> TokenHeads:
    return TokenHeads(x, *strides_of(x)[:2])
