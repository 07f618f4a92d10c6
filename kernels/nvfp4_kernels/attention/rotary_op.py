"""``rotary_attention``: rotary embedding, KV-cache store and attention of decodes in one launch."""

from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.attention.arguments import check_counters, check_paged
from nvfp4_kernels.attention.kernels import KEY_MULTIPLE, MAX_ROTARY_ROWS, ROTARY_KERNELS
from nvfp4_kernels.attention.op import scoring_of
from nvfp4_kernels.checks import InvalidArgument, check_dtype, reads_contents
from nvfp4_kernels.dispatch import called
from nvfp4_kernels.formats.nvfp4_rows import Nvfp4Rows, check_pair, new_nvfp4_rows
from nvfp4_kernels.heads import DTYPES, check_out
from nvfp4_kernels.rotary.store.arguments import check_rotary_store


class HeadRotation(NamedTuple):
    """Rotary embedding of heads, after an optional norm; see ``rotary_store``.

    Attributes:
        cos_sin_cache: ``(P, R)``, cosines and sines.
        neox: whether the elements of a pair are R/2 apart; else they are neighbours.
        q_norm, k_norm: weights ``(D,)``; None: no norm.
        eps: added to the mean square; with a norm only.
    """

    cos_sin_cache: Tensor
    neox: bool = True
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float | None = None


def takes(max_query_len: int, query_heads: int, kv_heads: int) -> bool:
    """Whether a batch has as few queries as ``rotary_attention`` takes."""
    return max_query_len * (query_heads // kv_heads) <= MAX_ROTARY_ROWS


def rotary_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    rotation: HeadRotation,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    counters: Tensor | None = None,
    input_scale: Tensor | None = None,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
    first_row: int = 0,
    settled: bool = False,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """``rotary_store`` and then causal ``paged_attention`` in one launch, bit-identical to both.

    For decodes of one or a few tokens per sequence: query i of n, like its key, stands at position
    ``seq_lens - n + i``.

    Args:
        q: as for ``rotary_store``, ``(T, Hq, D)``; with ``max_query_len`` at most 128 rows of a KV
            head's queries: ``max_query_len · Hq / Hkv``.
        k: ``(T, Hkv, D)``, see ``rotary_store``.
        v: the same.
        kv_cache: see ``paged_attention``; written.
        block_table: see ``paged_attention``.
        seq_lens: see ``paged_attention``; new tokens are counted.
        query_start: see ``paged_attention``; tokens after the last sequence's are not stored.
        slot_mapping: int64 ``(T,)``, see ``rotary_store``: a slot of the sequence's own pages.
        positions: int64 or int32 ``(T,)``: must equal the positions that follow from the lengths;
            checked on CPU only, not read on a GPU.
        rotation: rotary embedding and norm of the heads.
        max_query_len: see ``paged_attention``.
        max_seq_len: see ``paged_attention``.
        scale: see ``paged_attention``.
        window: see ``paged_attention``.
        soft_cap: see ``paged_attention``.
        sinks: see ``paged_attention``.
        k_scale: see ``paged_attention``.
        v_scale: see ``paged_attention``.
        counters: see ``paged_attention``.
        input_scale: float32 ``()``: the result is NVFP4, see ``paged_attention_quantized``; None:
            of ``q``'s dtype.
        out: memory for the result: of ``q``'s dtype and shape, or data and scales; None: new.
        first_row: see ``paged_attention_quantized``.
        settled: a promise that lets the kernel load lengths, pages and older keys before its
            predecessor ends: ``seq_lens``, ``query_start``, ``block_table`` and all keys and values
            but the new tokens' were written before an earlier launch of this op, or before a launch
            without programmatic dependence (torch's own kernels, or the first node of a graph; not
            ``rotary_store``). No sequence may read a page to which this call stores for another
            sequence.
        batch_invariant: see ``paged_attention``.

    Returns:
        The result or its data; its block scales, or None; and ``lse`` float32 ``(T, Hq)``: on
        sm_100 with a float8_e4m3fn cache computed from queries rounded to E4M3, as in
        ``paged_attention``; exponentials of degree 3 do not occur with so few rows.

    Raises:
        InvalidArgument: an argument that does not fit, named.
        NoKernelError: no kernel for this device.
    """
    check_dtype("q", q, DTYPES)
    scales: Tensor | None = None
    if isinstance(out, tuple):
        check_pair("out", out)
        data, scales = out
    elif input_scale is not None:
        data, scales = new_nvfp4_rows(q) if q.ndim == 3 else (q, q)  # the op refuses such q
    else:
        data = q.new_empty(q.shape) if out is None else out
    if not isinstance(rotation, tuple) or len(rotation) != len(HeadRotation._fields):
        raise InvalidArgument(
            f"rotation: is {type(rotation).__name__}, must be a HeadRotation; make one of the "
            "table of angles"
        )
    table, neox, q_norm, k_norm, eps = rotation
    lse = called(_rotary_attention, q, max_seq_len=KEY_MULTIPLE)(
        data, scales, q, k, v, kv_cache, block_table, seq_lens, query_start, slot_mapping,
        positions, table, q_norm, k_norm, sinks, k_scale, v_scale, input_scale, neox, eps,
        first_row, max_query_len, max_seq_len, scale, window, soft_cap, counters,
        settled, batch_invariant,
    )  # fmt: skip
    return data, scales, lse


@torch.library.custom_op(
    "nvfp4::rotary_attention", mutates_args=("out", "out_scales", "kv_cache", "counters")
)
def _rotary_attention(
    out: Tensor,
    out_scales: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    input_scale: Tensor | None,
    neox: bool,
    eps: float | None,
    first_row: int,
    max_query_len: int,
    max_seq_len: int,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    counters: Tensor | None,
    settled: bool,
    batch_invariant: bool,
) -> Tensor:
    scoring = scoring_of(q, scale, True, window, soft_cap, batch_invariant)
    mode = check_paged(
        q, kv_cache, block_table, seq_lens, query_start, sinks, k_scale, v_scale, max_query_len,
        max_seq_len, scoring,
    )  # fmt: skip
    check_rotary_store(
        q, k, v, positions, cos_sin_cache, kv_cache, slot_mapping, q_norm, k_norm, k_scale, v_scale,
        eps,
    )  # fmt: skip
    check_counters(counters, q, kv_cache, seq_lens)
    if len(slot_mapping) != len(q):
        raise InvalidArgument(
            f"slot_mapping: has {len(slot_mapping)} elements, must have {len(q)}, one for each row "
            "of q; leave padding out"
        )
    if not takes(max_query_len, q.shape[1], kv_cache.shape[1]):
        heads, kv_heads = q.shape[1], kv_cache.shape[1]
        raise InvalidArgument(
            f"max_query_len: is {max_query_len}, must be at most "
            f"{MAX_ROTARY_ROWS * kv_heads // heads} with {heads} query heads and {kv_heads} of "
            "keys; call rotary_store and paged_attention"
        )
    if reads_contents(q):
        _check_positions(positions, seq_lens, query_start)
    result: Tensor | Nvfp4Rows = out
    if out_scales is not None and input_scale is not None:
        result = Nvfp4Rows(out, out_scales, input_scale, first_row)
        result.check(*q.shape)
    elif out_scales is not None or input_scale is not None:
        raise InvalidArgument(
            "input_scale: must be given exactly where out is a pair, data and scales; give both "
            "for a result in NVFP4, or neither"
        )
    else:
        check_out(out, q)
    kernel = ROTARY_KERNELS.select(q.device, mode, batch_invariant).load()
    return kernel(
        q, k, v, kv_cache, block_table, seq_lens, query_start, slot_mapping, positions,
        cos_sin_cache, q_norm, k_norm, sinks, k_scale, v_scale, neox, eps, max_query_len,
        max_seq_len, settled, scoring, counters, result,
    )  # fmt: skip


@_rotary_attention.register_fake
def _(out: Tensor, out_scales: Tensor | None, q: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


def _check_positions(positions: Tensor, seq_lens: Tensor, query_start: Tensor) -> None:
    starts = query_start.tolist()
    for b, keys in enumerate(seq_lens.tolist()):
        begin, end = starts[b : b + 2]
        expected = list(range(keys - (end - begin), keys))
        if positions[begin:end].tolist() != expected:
            raise InvalidArgument(
                f"positions: of sequence {b} are {positions[begin:end].tolist()}, must be those of "
                f"its last keys, {expected}; call rotary_store and paged_attention"
            )
