"""Argument checks of ``rotary_store``."""

import math

import torch
from torch import Tensor

from nvfp4_kernels.checks import (
    InvalidArgument,
    check_dtype,
    check_same_device,
    check_shape,
    reads_contents,
)
from nvfp4_kernels.dispatch import Mode
from nvfp4_kernels.heads import check_cache, check_out, check_queries
from nvfp4_kernels.rotary.store.call import RotaryStoreCall
from nvfp4_kernels.runtime.recording import compared


def check_rotary_store(call: RotaryStoreCall) -> Mode:
    """Check all arguments but ``out``; return the mode."""
    _, q, k, v, positions, cos_sin_cache, kv_cache, slot_mapping, *_ = call
    q_norm, k_norm, k_scale, v_scale = call.q_norm, call.k_norm, call.k_scale, call.v_scale
    check_queries(q, "(T, Hq, D)")
    mode = check_cache(q, kv_cache, k_scale, v_scale)
    head_dim = q.shape[-1]
    _check_vector("slot_mapping", slot_mapping, (torch.int64,))
    tokens = slot_mapping.shape[0]
    for name, x in (("k", k), ("v", v)):
        check_dtype(name, x, (q.dtype,))
        expected = (*x.shape[:1], kv_cache.shape[1], head_dim)
        check_shape(name, x, expected, "a head per head of kv_cache, as wide as q's")
        if x.numel() and x.stride(-1) != 1:
            raise InvalidArgument(
                f"{name}: strides are {x.stride()}, the last must be 1; call contiguous() on it"
            )
    _check_vector("positions", positions, (torch.int64, torch.int32))
    for name, x in (("q", q), ("k", k), ("v", v), ("positions", positions)):
        if x.shape[0] < tokens:
            raise InvalidArgument(
                f"{name}: has {x.shape[0]} rows, must have at least {tokens}, one per slot of "
                "slot_mapping; cut slot_mapping"
            )
    _check_table(cos_sin_cache, q)
    _check_norms(q, q_norm, k_norm, call.eps)
    check_same_device(
        q=q, k=k, v=v, positions=positions, cos_sin_cache=cos_sin_cache, kv_cache=kv_cache,
        slot_mapping=slot_mapping, q_norm=q_norm, k_norm=k_norm, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    if reads_contents(q):
        _check_contents(positions[:tokens], len(cos_sin_cache), slot_mapping, kv_cache)
    return mode


def check_out_of(out: Tensor, q: Tensor) -> None:
    """Raise unless ``out`` passes ``check_out``, and is ``q`` itself or does not overlap ``q``."""
    check_out(out, q)
    lie = compared(out, q)
    if q.numel() and (lie == "overlapping" or (lie == "one start" and not q.is_contiguous())):
        raise InvalidArgument(
            "out: overlaps q, must be q itself, contiguous, or memory of its own; leave it out"
        )


def _check_vector(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    check_dtype(name, x, dtypes)
    if x.ndim != 1:
        raise InvalidArgument(
            f"{name}: shape is {tuple(x.shape)}, must have 1 dimension; reshape it"
        )
    if not x.is_contiguous():
        raise InvalidArgument(
            f"{name}: strides are {x.stride()}, must be (1,); call contiguous() on it"
        )


def _check_table(cos_sin_cache: Tensor, q: Tensor) -> None:
    check_dtype("cos_sin_cache", cos_sin_cache, (q.dtype, torch.float32))
    if cos_sin_cache.ndim != 2:
        raise InvalidArgument(
            f"cos_sin_cache: shape is {tuple(cos_sin_cache.shape)}, must be (P, R): a row of R/2 "
            "cosines and R/2 sines per position; reshape it"
        )
    rotary_dim, head_dim = cos_sin_cache.shape[1], q.shape[-1]
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise InvalidArgument(
            f"cos_sin_cache: R is {rotary_dim}, must be even and from 2 to {head_dim}, q's D; give "
            "a row R/2 cosines and R/2 sines"
        )
    if not cos_sin_cache.is_contiguous():
        raise InvalidArgument(
            f"cos_sin_cache: strides are {cos_sin_cache.stride()} for shape "
            f"{tuple(cos_sin_cache.shape)}, must be contiguous; call contiguous() on it"
        )


def _check_norms(
    q: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float | None
) -> None:
    given = [(n, x) for n, x in (("q_norm", q_norm), ("k_norm", k_norm)) if x is not None]
    for name, weight in given:
        first = given[0][1]
        check_dtype(name, weight, (q.dtype, torch.float32))
        check_shape(name, weight, q.shape[-1:], "one factor per element of a head")
        if not weight.is_contiguous():
            raise InvalidArgument(
                f"{name}: strides are {weight.stride()}, must be (1,); call contiguous() on it"
            )
        if weight.dtype != first.dtype:
            check_dtype(name, weight, (first.dtype,))
    if given and eps is None:
        raise InvalidArgument(
            f"eps: is missing, must be given with {given[0][0]}; models use 1e-5 or so"
        )
    if eps is not None:
        if not given:
            raise InvalidArgument(
                "eps: is given without q_norm or k_norm, must go with one; leave it out"
            )
        if not (math.isfinite(eps) and eps >= 0):
            raise InvalidArgument(
                f"eps: is {eps}, must be 0 or more and finite; models use 1e-5 or so"
            )


def _check_contents(positions: Tensor, count: int, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    wrong = positions[(positions < 0) | (positions >= count)]
    if wrong.numel():
        raise InvalidArgument(
            f"positions: holds {wrong[0]}, must be from 0 to {count - 1}, the rows of "
            "cos_sin_cache; make the cache for as many positions as the model has"
        )
    slots = kv_cache.shape[0] * kv_cache.shape[2]
    wrong = slot_mapping[slot_mapping >= slots]
    if wrong.numel():
        raise InvalidArgument(
            f"slot_mapping: holds {wrong[0]}, must be below {slots}, the slots of kv_cache; check "
            "the pages of its sequence"
        )
