"""``rotary_attention``: rotary embedding, KV-cache store and attention of decodes in one launch."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.attention.arguments import check_output, check_paged
from nvfp4_kernels.attention.call import RotaryCall
from nvfp4_kernels.attention.kernels import KEY_MULTIPLE, MAX_ROTARY_ROWS, ROTARY_KERNELS
from nvfp4_kernels.checks import InvalidArgument, check_dtype, reads_contents
from nvfp4_kernels.dispatch import Mode, called
from nvfp4_kernels.formats.nvfp4_rows import Nvfp4Rows, check_pair, new_nvfp4_rows
from nvfp4_kernels.formats.output import Static
from nvfp4_kernels.heads import DTYPES, check_out
from nvfp4_kernels.rotary.store.arguments import check_rotary_store

_SCHEMA = (
    "(Tensor(a!) out, Tensor(b!)? out_scales, Tensor q, Tensor k, Tensor v, Tensor(c!) kv_cache, "
    "Tensor block_table, Tensor seq_lens, Tensor query_start, Tensor slot_mapping, "
    "Tensor positions, Tensor cos_sin_cache, Tensor? q_norm, Tensor? k_norm, Tensor? sinks, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? input_scale, bool neox, float? eps, "
    "SymInt first_row, SymInt max_query_len, SymInt max_seq_len, float? scale, SymInt? window, "
    "float? soft_cap, Tensor(d!)? counters, bool settled, bool batch_invariant) -> Tensor"
)


class HeadRotation(NamedTuple):
    """Rotary embedding of heads, after an optional norm; see ``rotary_store``.

    Attributes:
        cos_sin_cache: ``(P, R)``, R/2 cosines and then R/2 sines of each position.
        neox: whether the elements of a rotated pair are R/2 apart; else they are neighbours.
        q_norm, k_norm: weights ``(D,)`` of the norms of queries and keys; None: no norm.
        eps: added to the mean square; with a norm only.
    """

    cos_sin_cache: Tensor
    neox: bool = True
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float | None = None


def takes(max_query_len: int, query_heads: int, kv_heads: int) -> bool:
    """Whether ``rotary_attention`` takes a batch: each KV head has few enough rows of queries."""
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
    output: Static | None = None,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
    first_row: int = 0,
    settled: bool = False,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """``rotary_store``, then causal ``paged_attention``: one launch, bit-identical to the two ops.

    For decodes of one or a few tokens per sequence: query i of n, like its key, stands at position
    ``seq_lens - n + i``.

    Args:
        q: ``(T, Hq, D)``, as for ``rotary_store``; a KV head has at most 128 rows of queries per
            sequence: ``max_query_len · Hq / Hkv``.
        k: ``(T, Hkv, D)``, see ``rotary_store``.
        v: values ``(T, Hkv, D)``, see ``rotary_store``.
        kv_cache: see ``paged_attention``; written.
        block_table: see ``paged_attention``.
        seq_lens: see ``paged_attention``; lengths include the new tokens.
        query_start: see ``paged_attention``; tokens after the last sequence's are not stored.
        slot_mapping: int64 ``(T,)``, see ``rotary_store``; slots in the sequence's own pages.
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
        output: see ``paged_attention``.
        out: see ``paged_attention``.
        first_row: see ``paged_attention``.
        settled: a promise that lets the kernel load lengths, pages and older keys before the
            preceding kernel ends: ``seq_lens``, ``query_start``, ``block_table``, and the keys and
            values of all tokens but the new ones were written before an earlier launch of this op,
            or before a launch without programmatic dependence (one of torch's own kernels, or the
            first node of a graph; not ``rotary_store``). No sequence may read a page to which this
            call stores for another sequence.
        batch_invariant: see ``paged_attention``.

    Returns:
        ``out`` or, with ``Static``, ``data``; the block scales, None without ``Static``; and
        ``lse`` float32 ``(T, Hq)``. On sm_100 with a float8_e4m3fn cache, ``lse`` follows from
        queries rounded to E4M3, as in ``paged_attention``, but polynomials of degree 3 are never
        used: a KV head has at most 128 rows.

    Raises:
        InvalidArgument: an unsupported or inconsistent argument; the message names it. On sm_100, a
            batch has at most 65,535 sequences.
        NoKernelError: no kernel for this device.
    """
    check_dtype("q", q, DTYPES)
    check_output(output, out, first_row)
    memory: Any = out
    if output is None:
        memory = (q.new_empty(q.shape) if out is None else out), None
    elif out is None:
        memory = new_nvfp4_rows(q) if q.ndim == 3 else (q, q)  # the op refuses such q
    check_pair("out", memory)
    data, scales = memory
    input_scale = None if output is None else output.global_scale
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
    "nvfp4::rotary_attention",
    mutates_args=("out", "out_scales", "kv_cache", "counters"),
    schema=_SCHEMA,
)
def _rotary_attention(*arguments: Any) -> Tensor:
    call = RotaryCall(*arguments)
    mode = _check(call)
    return ROTARY_KERNELS.select(call.q.device, mode, call.batch_invariant).load()(call)


@_rotary_attention.register_fake
def _(out: Tensor, out_scales: Tensor | None, q: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


def _check(call: RotaryCall) -> Mode:
    mode = check_paged(call.paged)
    check_rotary_store(call.store)
    q, heads, kv_heads = call.q, call.q.shape[1], call.kv_cache.shape[1]
    if len(call.slot_mapping) != len(q):
        raise InvalidArgument(
            f"slot_mapping: has {len(call.slot_mapping)} elements, must have {len(q)}, one for "
            "each row of q; leave padding out"
        )
    if not takes(call.max_query_len, heads, kv_heads):
        raise InvalidArgument(
            f"max_query_len: is {call.max_query_len}, must be at most "
            f"{MAX_ROTARY_ROWS * kv_heads // heads} with {heads} query heads and {kv_heads} of "
            "keys; call rotary_store and paged_attention"
        )
    if reads_contents(q):
        _check_positions(call.positions, call.seq_lens, call.query_start)
    if (call.out_scales is None) != (call.input_scale is None):
        raise InvalidArgument(
            "input_scale: must be given exactly where out is a pair, data and scales; give both "
            "for a result in NVFP4, or neither"
        )
    result = call.result
    if isinstance(result, Nvfp4Rows):
        result.check(*q.shape)
    else:
        check_out(result, q)
    return mode


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
