"""``paged_attention``: attention to keys in a paged cache, with a 16-bit or NVFP4 result."""

from typing import Any, overload

import torch
from torch import Tensor

from nvfp4_kernels.attention.arguments import check_output, check_paged
from nvfp4_kernels.attention.call import PagedCall
from nvfp4_kernels.attention.kernels import KEY_MULTIPLE, PAGED_KERNELS
from nvfp4_kernels.attention.op import new_result
from nvfp4_kernels.checks import check_dtype, check_same_device
from nvfp4_kernels.dispatch import called
from nvfp4_kernels.formats.nvfp4_rows import Nvfp4Rows, check_pair, new_nvfp4_rows
from nvfp4_kernels.formats.output import Static
from nvfp4_kernels.heads import DTYPES, check_out

_TENSORS = (
    "Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor query_start, "
    "Tensor? sinks, Tensor? k_scale, Tensor? v_scale"
)
_OPTIONS = (
    "SymInt max_query_len, SymInt max_seq_len, float? scale, bool causal, SymInt? window, "
    "float? soft_cap, Tensor(c!)? counters, bool batch_invariant"
)


@overload
def paged_attention(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start: Tensor, *,
    max_query_len: int, max_seq_len: int, scale: float | None = ..., causal: bool = ...,
    window: int | None = ..., soft_cap: float | None = ..., sinks: Tensor | None = ...,
    k_scale: Tensor | None = ..., v_scale: Tensor | None = ..., counters: Tensor | None = ...,
    output: None = ..., out: Tensor | None = ..., batch_invariant: bool = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def paged_attention(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start: Tensor, *,
    max_query_len: int, max_seq_len: int, scale: float | None = ..., causal: bool = ...,
    window: int | None = ..., soft_cap: float | None = ..., sinks: Tensor | None = ...,
    k_scale: Tensor | None = ..., v_scale: Tensor | None = ..., counters: Tensor | None = ...,
    output: Static, out: tuple[Tensor, Tensor] | None = ..., first_row: int = ...,
    batch_invariant: bool = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    counters: Tensor | None = None,
    output: Static | None = None,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
    first_row: int = 0,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Attention of each sequence's last tokens to the sequence's keys in a paged cache.

    Serves prefill, decode and batches of both. The call does not synchronise with the device, and
    only the result depends on the contents of index tensors: a CUDA graph may capture it. Slots of
    a page beyond a sequence's length, and entries of the sequence's row in ``block_table`` for
    pages without a key that any query sees, may hold anything. Values before a window, in the page
    where the window begins, must be finite, as P = 0 may multiply them; values that the sequence
    itself has computed are finite.

    On sm_100 polynomials of degree 4, with a relative error of 2.9e-6, compute six of every 16
    exponentials. With a float8_e4m3fn cache the kernel of sm_100 also rounds P to E4M3, and each
    row of queries (one head of one token) to E4M3 with a scale per row; ``lse`` follows from the
    rounded queries. The degree is then 3 if the rows of queries per sequence and KV head,
    ``max_query_len · Hq / Hkv``, are more than 128, D is at most 128, and ``batch_invariant`` is
    not set: ``lse`` is off by up to 1.02e-4 beyond the rounding of float32, by about 7e-5 with
    usual logits. With float16 queries and cache, softmax weights of less than 2^-21 of the row's
    largest become multiples of 2^-32 of it.

    Args:
        q: bfloat16 or float16 ``(T, Hq, D)``, D a multiple of 16 up to 256, the last stride 1;
            other strides are free.
        kv_cache: ``(pages, Hkv, page_size, 2·D)``, a key and then its value, of ``q``'s dtype or
            float8_e4m3fn; strides are free but for the last. Hq is a multiple of Hkv. On sm_100
            ``page_size`` is a power of two of at least 16, and with float8_e4m3fn D a multiple of
            32.
        block_table: int32 ``(B, P)``: page ``block_table[b, i]`` holds keys ``i · page_size`` on of
            sequence b.
        seq_lens: int32 ``(B,)``, the number of keys of each sequence, including the keys of the
            query tokens.
        query_start: int32 ``(B + 1,)``: rows ``query_start[b]`` up to, not including,
            ``query_start[b + 1]`` of ``q`` are the last tokens of sequence b; results of rows after
            the last sequence's are undefined.
        max_query_len: upper bound on the queries of a sequence.
        max_seq_len: upper bound on the keys of a sequence.
        scale: see ``attention``.
        causal: see ``attention``.
        window: see ``attention``.
        soft_cap: see ``attention``.
        sinks: see ``attention``.
        k_scale: float32 ``()``, with a float8_e4m3fn cache: factor that dequantises stored keys.
        v_scale: float32 ``()``, if ``k_scale`` is given: factor that dequantises stored values.
        counters: int32 ``(≥ B · Hkv,)``, zeros before and after the call: semaphores with which the
            last CTA of a decode merges the splits of the keys. None: a second launch merges them.
            Concurrent calls must not share counters.
        output: format of the result. None: ``q``'s dtype. ``Static(global_scale)``: NVFP4 for the
            next GEMM, bit-identical to ``quantize`` of the 16-bit result; D must be a multiple of
            32, and Hq·D a multiple of 64.
        out: memory for the result: contiguous, of ``q``'s dtype and shape; with ``Static`` a pair,
            ``data`` and ``scales``, and ``scales`` may belong to a taller operand that contains
            ``q``'s rows. None: new tensors.
        first_row: with ``Static``, index of ``q``'s first row among the operand's rows.
        batch_invariant: whether a row's result depends, to the bit, on its query and keys alone.
            Disables split-KV, so that a few long sequences take longer.

    Returns:
        ``out`` of ``q``'s dtype and shape, and ``lse`` float32 ``(T, Hq)``; see ``attention``, and
        above for errors on sm_100. With ``Static``, ``data`` uint8 ``(T, Hq, D/2)``,
        ``scales`` float8_e4m3fn in the blocked layout of an operand ``(M, Hq·D)``, ``(ceil(M/128),
        Hq·D/64, 32, 16)``, where the scales of other rows, including padding, stay unchanged, and
        ``lse``.

    Raises:
        InvalidArgument: an unsupported or inconsistent argument; the message names it. The
            contents of tensors are checked on CPU only. On sm_100, a batch has at
            most 65,535 sequences, and a sequence at most 65,535 tiles of query rows.
        NoKernelError: no kernel for this device.
    """
    tensors = q, kv_cache, block_table, seq_lens, query_start, sinks, k_scale, v_scale
    options = (
        max_query_len, max_seq_len, scale, causal, window, soft_cap, counters, batch_invariant,
    )  # fmt: skip
    check_output(output, out, first_row)
    memory: Any = out
    if output is not None:
        check_dtype("q", q, DTYPES)
        if memory is None:
            memory = new_nvfp4_rows(q) if q.ndim == 3 else (q, q)  # the op refuses such q
        check_pair("out", memory)
        op = called(_paged_attention_quantized, q, max_seq_len=KEY_MULTIPLE)
        return *memory, op(*memory, *tensors, output.global_scale, first_row, *options)
    if memory is None:
        return called(_paged_attention, q, max_seq_len=KEY_MULTIPLE)(*tensors, *options)
    check_out(memory, q)
    op = called(_paged_attention_into, q, max_seq_len=KEY_MULTIPLE)
    return memory, op(memory, *tensors, *options)


@torch.library.custom_op(
    "nvfp4::paged_attention",
    mutates_args=("counters",),
    schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _paged_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _run(PagedCall(*arguments))


@_paged_attention.register_fake
def _(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return new_result(q)


@torch.library.custom_op(
    "nvfp4::paged_attention_into",
    mutates_args=("out", "counters"),
    schema=f"(Tensor(a!) out, {_TENSORS}, {_OPTIONS}) -> Tensor",
)
def _paged_attention_into(out: Tensor, *arguments: Any) -> Tensor:
    return _run(PagedCall._make((*arguments, out)))[1]


@_paged_attention_into.register_fake
def _(out: Tensor, q: Tensor, *rest: object) -> Tensor:
    return new_result(q)[1]


@torch.library.custom_op(
    "nvfp4::paged_attention_quantized",
    mutates_args=("out", "out_scales", "counters"),
    schema=f"(Tensor(a!) out, Tensor(b!) out_scales, {_TENSORS}, Tensor input_scale, "
    f"SymInt first_row, {_OPTIONS}) -> Tensor",
)
def _paged_attention_quantized(out: Tensor, out_scales: Tensor, *arguments: Any) -> Tensor:
    tensors, (input_scale, first_row), options = arguments[:8], arguments[8:10], arguments[10:]
    rows = Nvfp4Rows(out, out_scales, input_scale, first_row)
    return _run(PagedCall._make((*tensors, *options, rows)))[1]


@_paged_attention_quantized.register_fake
def _(out: Tensor, out_scales: Tensor, q: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


def _run(call: PagedCall) -> tuple[Tensor, Tensor]:
    mode = check_paged(call)
    if isinstance(call.out, Nvfp4Rows):
        call.out.check(*call.q.shape)
        check_same_device(q=call.q, out=call.out.data)
    return PAGED_KERNELS.select(call.q.device, mode, call.batch_invariant).load()(call)
