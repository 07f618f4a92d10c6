"""Argument checks for attention heads: queries, and a paged cache of keys and values."""

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_same_device, check_shape
from nvfp4_kernels.dispatch import Mode

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


def check_out(out: Tensor, q: Tensor) -> None:
    """Raise unless ``out`` has the dtype, shape and device of ``q``, and is contiguous."""
    check_dtype("q", q, DTYPES)
    check_dtype("out", out, (q.dtype,))
    check_shape("out", out, q.shape, "one row per row of q")
    check_same_device(q=q, out=out)
    if not out.is_contiguous():
        raise InvalidArgument(
            f"out: strides are {out.stride()} for shape {tuple(out.shape)}, must be contiguous; "
            "leave it out and copy the result"
        )


def check_queries(q: Tensor, form: str) -> None:
    """Raise unless ``q`` has a supported dtype and D, and as many dimensions as ``form``.

    ``form`` is a text such as ``"(T, Hq, D)"``.
    """
    check_dtype("q", q, DTYPES)
    check_form("q", q, form)
    head_dim = q.shape[-1]
    if head_dim % 16 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise InvalidArgument(
            f"q: D is {head_dim}, must be a multiple of 16 from 16 to {MAX_HEAD_DIM}; pad q, k and "
            "v with zeros and pass scale"
        )


def check_cache(
    q: Tensor, kv_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> Mode:
    """Raise unless ``kv_cache`` and its scales fit ``q``; return ``"fp8_kv"`` or ``"float"``."""
    check_dtype("kv_cache", kv_cache, (q.dtype, torch.float8_e4m3fn))
    check_form("kv_cache", kv_cache, "(pages, Hkv, page_size, 2·D)")
    if kv_cache.shape[-1] != 2 * q.shape[-1]:
        raise InvalidArgument(
            f"kv_cache: its last dimension is {kv_cache.shape[-1]}, must be {2 * q.shape[-1]}, "
            "twice q's D; put a key and its value side by side"
        )
    if kv_cache.shape[2] == 0:
        raise InvalidArgument("kv_cache: page_size is 0, must be positive; 16 is usual")
    check_heads("kv_cache", q.shape[-2], kv_cache.shape[1])
    fp8 = kv_cache.dtype == torch.float8_e4m3fn
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if fp8 and scale is None:
            raise InvalidArgument(
                f"{name}: is missing, must be given with a float8_e4m3fn cache; pass a float32 "
                "scalar tensor, 1 if there is no scale"
            )
        if not fp8 and scale is not None:
            raise InvalidArgument(
                f"{name}: is given with a cache of q's dtype, which has no scale; leave it out"
            )
        if scale is not None:
            check_dtype(name, scale, (torch.float32,))
            check_shape(name, scale, (), "one scale for the whole cache")
    return "fp8_kv" if fp8 else "float"


def check_form(name: str, x: Tensor, form: str) -> None:
    """Raise unless ``x`` has as many dimensions as ``form``, and stride 1 in the last.

    ``form`` is a text such as ``"(pages, page_bytes)"``.
    """
    dims = form.count(",") + 1
    if x.ndim != dims:
        raise InvalidArgument(f"{name}: shape is {tuple(x.shape)}, must be {form}; reshape it")
    if x.numel() and x.stride(-1) != 1:
        raise InvalidArgument(
            f"{name}: strides are {x.stride()}, the last must be 1; call contiguous() on it"
        )


def check_heads(name: str, query_heads: int, key_heads: int) -> None:
    """Raise unless the number of query heads is a multiple of the number of KV heads."""
    if key_heads == 0 or query_heads == 0 or query_heads % key_heads:
        raise InvalidArgument(
            f"{name}: has {key_heads} heads, q's {query_heads} must be a multiple of them; "
            "repeat heads of keys and values, or check q"
        )
