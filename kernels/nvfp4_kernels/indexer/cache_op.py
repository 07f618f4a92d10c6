"""Ops on quantised vectors: ``indexer_quantize_q``, ``indexer_store_k``, ``indexer_gather_k``."""

from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.checks import (
    InvalidArgument,
    check_dtype,
    check_same_device,
    check_shape,
    reads_contents,
)
from nvfp4_kernels.indexer.arguments import (
    check_block_table,
    check_cache,
    check_contiguous,
    check_count,
    check_form,
    check_global_scale,
    check_head_dim,
    check_pages,
    check_unquantized,
)
from nvfp4_kernels.indexer.call import GatherCall
from nvfp4_kernels.indexer.formats import format_of
from nvfp4_kernels.indexer.kernels import GATHER_K_KERNELS, QUANTIZE_Q_KERNELS, STORE_K_KERNELS

SKIPPED = -1  # slot of a key that is not stored


def indexer_quantize_q(
    q: Tensor, fmt: str, global_scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Quantise queries, each head separately.

    Args:
        q: bfloat16 ``(T, H, D)``, D a multiple of 32 up to 256; the last stride is 1, others are
            arbitrary.
        fmt: ``"nvfp4"``, ``"mxfp4"``, ``"fp8"`` or ``"bf16"`` (a copy).
        global_scale: float32 ``()``, for nvfp4 only: ``max|q| / 2688`` over calibration data. ``q``
            is about the returned data times scales times ``global_scale``. Scoring ignores global
            scales; for scores in the units of the inputs, multiply the heads' weights by the global
            scales of queries and keys.

    Returns:
        Data and scales. nvfp4: uint8 ``(T, H, D/2)`` and float8_e4m3fn ``(T, H, D/16)``. mxfp4:
        uint8 ``(T, H, D/2)`` and float8_e8m0fnu ``(T, H, D/32)``. fp8: float8_e4m3fn ``(T, H, D)``
        and float32 ``(T, H)``, powers of two. bf16: a copy of ``q``, and None. For finite queries
        mxfp4 and fp8 are bit-identical to vLLM 0.32's DeepSeek V4.

    Raises:
        InvalidArgument: an unsupported or inconsistent argument; the message names it. The
            contents of tensors are checked on CPU only.
        NoKernelError: no kernel for this device.
    """
    data, *scales = torch.ops.nvfp4.indexer_quantize_q(q, fmt, global_scale)
    return data, scales[0] if scales else None


def indexer_store_k(
    k: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    fmt: str,
    block_size: int,
    global_scale: Tensor | None = None,
) -> None:
    """Quantise keys, and store them in a paged cache, in place.

    Args:
        k: bfloat16 ``(T, D)``, with D and the last stride as ``q`` of ``indexer_quantize_q``.
        cache: uint8 ``(pages, page_bytes)``; a page holds the data of ``block_size`` keys, then the
            keys' scales (see ``formats.py``). Pages may have any stride; bytes between pages are
            not written.
        slot_mapping: int64 ``(T,)``: key t goes to slot ``slot_mapping[t] % block_size`` of page
            ``slot_mapping[t] // block_size``, each slot at most once; −1 skips the key.
        fmt: as for ``indexer_quantize_q``.
        block_size: number of keys per page.
        global_scale: global scale of the keys, as for ``indexer_quantize_q``.

    Raises:
        InvalidArgument, NoKernelError: as ``indexer_quantize_q``.
    """
    torch.ops.nvfp4.indexer_store_k(k, cache, slot_mapping, fmt, block_size, global_scale)


def indexer_gather_k(
    cache: Tensor,
    block_table: Tensor,
    key_start: Tensor,
    total_keys: int,
    head_dim: int,
    fmt: str,
    block_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Gather the stored keys of several sequences from a paged cache to contiguous rows.

    Corresponds to ``cp_gather_indexer_k_quant_cache`` of vLLM, which precedes scoring in prefill.

    Args:
        cache: as for ``indexer_store_k``.
        block_table: int32 ``(B, P)``: page ``block_table[b, i]`` holds the keys of sequence b from
            key ``i · block_size`` on. Entries after a sequence's last page may hold anything.
        key_start: int32 ``(B + 1,)``: the first ``key_start[b + 1] - key_start[b]`` keys of
            sequence b are gathered to rows from ``key_start[b]`` on.
        total_keys: number of rows of the result, at least ``key_start[B]``; rows from
            ``key_start[B]`` on are unspecified.
        head_dim: number of elements per key, D.
        fmt: as for ``indexer_quantize_q``.
        block_size: number of keys per page.

    Returns:
        Data and scales of ``total_keys`` keys, as arguments of ``indexer_logits``; the scales are
        None for bf16.

    Raises:
        InvalidArgument, NoKernelError: as ``indexer_quantize_q``.
    """
    data, *scales = torch.ops.nvfp4.indexer_gather_k(
        cache, block_table, key_start, total_keys, head_dim, fmt, block_size
    )
    return data, scales[0] if scales else None


@torch.library.custom_op("nvfp4::indexer_quantize_q", mutates_args=())
def _quantize_q(q: Tensor, fmt: str, global_scale: Tensor | None) -> list[Tensor]:
    """Check the arguments of ``indexer_quantize_q``, and run its kernel."""
    known = format_of(fmt)
    check_unquantized("q", q, "(T, H, D)")
    check_global_scale(known, global_scale)
    check_same_device(q=q, global_scale=global_scale)
    kernel = QUANTIZE_Q_KERNELS.select(q.device, known.name).load()
    return kernel(q, known, global_scale)


@_quantize_q.register_fake
def _(q: Tensor, fmt: str, global_scale: Tensor | None) -> list[Tensor]:
    tokens, heads, head_dim = q.shape
    return format_of(fmt).empty(q, (tokens, heads), head_dim)


@torch.library.custom_op("nvfp4::indexer_store_k", mutates_args=("cache",))
def _store_k(
    k: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    fmt: str,
    block_size: int,
    global_scale: Tensor | None,
) -> None:
    """Check the arguments of ``indexer_store_k``, and run its kernel."""
    known = format_of(fmt)
    check_unquantized("k", k, "(T, D)")
    check_cache(cache, known, k.shape[1], block_size)
    check_dtype("slot_mapping", slot_mapping, (torch.int64,))
    check_shape("slot_mapping", slot_mapping, (len(k),), "one slot per key of k")
    check_contiguous("slot_mapping", slot_mapping)
    check_global_scale(known, global_scale)
    check_same_device(k=k, cache=cache, slot_mapping=slot_mapping, global_scale=global_scale)
    if reads_contents(k):
        _check_slots(slot_mapping, len(cache) * block_size)
    kernel = STORE_K_KERNELS.select(k.device, known.name).load()
    kernel(k, cache, slot_mapping, known, block_size, global_scale)


@_store_k.register_fake
def _(
    k: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    fmt: str,
    block_size: int,
    global_scale: Tensor | None,
) -> None:
    format_of(fmt)


@torch.library.custom_op(
    "nvfp4::indexer_gather_k",
    mutates_args=(),
    schema="(Tensor cache, Tensor block_table, Tensor key_start, SymInt total_keys, "
    "SymInt head_dim, str fmt, SymInt block_size) -> Tensor[]",
)
def _gather_k(*arguments: Any) -> list[Tensor]:
    *tensors_and_sizes, fmt, block_size = arguments
    call = GatherCall._make((*tensors_and_sizes, format_of(fmt), block_size))
    _check_gather(call)
    return GATHER_K_KERNELS.select(call.cache.device, call.fmt.name).load()(call)


@_gather_k.register_fake
def _(cache: Tensor, *rest: Any) -> list[Tensor]:
    _, _, total_keys, head_dim, fmt, _ = rest
    return format_of(fmt).empty(cache, (total_keys,), head_dim)


def _check_gather(call: GatherCall) -> None:
    """Raise unless ``indexer_gather_k`` can take the arguments."""
    cache, block_table, key_start, total_keys, head_dim, fmt, block_size = call
    check_head_dim("head_dim", head_dim)
    check_cache(cache, fmt, head_dim, block_size)
    check_dtype("key_start", key_start, (torch.int32,))
    check_form("key_start", key_start, "(B + 1)")
    check_contiguous("key_start", key_start)
    if len(key_start) == 0:
        raise InvalidArgument(
            "key_start: is empty, must hold B + 1 starts; for no sequence pass one 0"
        )
    check_block_table(block_table, len(key_start) - 1)
    check_count("total_keys", total_keys, "pass the sum of the sequences' lengths")
    check_same_device(cache=cache, block_table=block_table, key_start=key_start)
    if reads_contents(cache):
        _check_starts(key_start, total_keys)
        check_pages(cache, block_table, block_size, key_start.diff())


def _check_slots(slot_mapping: Tensor, slots: int) -> None:
    """Raise unless ``slot_mapping`` holds distinct slots below ``slots``, or −1 to skip keys."""
    wrong = slot_mapping[(slot_mapping < SKIPPED) | (slot_mapping >= slots)]
    if wrong.numel():
        raise InvalidArgument(
            f"slot_mapping: holds {wrong[0]}, must be from 0 to {slots - 1}, the slots of cache, "
            f"or {SKIPPED} for a key to skip; check the sequence's pages"
        )
    found, counts = slot_mapping[slot_mapping != SKIPPED].unique(return_counts=True)
    if (counts > 1).any():
        raise InvalidArgument(
            f"slot_mapping: holds {found[counts > 1][0]} twice, must hold a slot once; pass "
            f"{SKIPPED} for a key to skip"
        )


def _check_starts(key_start: Tensor, total_keys: int) -> None:
    """Raise unless ``key_start`` begins with 0, never falls, and ends at most at ``total_keys``."""
    first, last = int(key_start[0]), int(key_start[-1])
    if first != 0:
        raise InvalidArgument(f"key_start: begins with {first}, must begin with 0; prepend it")
    lengths = key_start.diff()
    if (lengths < 0).any():
        raise InvalidArgument(
            f"key_start: falls at {int(lengths.argmin())}, must not; cumsum() the lengths"
        )
    if last > total_keys:
        raise InvalidArgument(
            f"total_keys: is {total_keys}, must be at least {last}, the end of key_start"
        )
