"""``paged_attention_quantized``: paged attention with an NVFP4 result, the next GEMM's operand."""

import torch
from torch import Tensor

from nvfp4_kernels.attention.arguments import check_counters, check_paged
from nvfp4_kernels.attention.kernels import KEY_MULTIPLE, QUANTIZED_KERNELS
from nvfp4_kernels.attention.op import scoring_of
from nvfp4_kernels.checks import check_dtype, check_same_device
from nvfp4_kernels.dispatch import called
from nvfp4_kernels.formats.nvfp4_rows import Nvfp4Rows, check_pair, new_nvfp4_rows
from nvfp4_kernels.heads import DTYPES


def paged_attention_quantized(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    input_scale: Tensor,
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
    out: tuple[Tensor, Tensor] | None = None,
    first_row: int = 0,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``paged_attention`` with the result quantised to NVFP4 for the next GEMM.

    Bit-identical to ``quantize(paged_attention(...), input_scale)``: the result is rounded to
    ``q``'s dtype first.

    Args:
        q: as for ``paged_attention``, D a multiple of 32 and Hq·D of 64.
        kv_cache: see ``paged_attention``.
        block_table: see ``paged_attention``.
        seq_lens: see ``paged_attention``.
        query_start: see ``paged_attention``.
        input_scale: float32 ``()``, the factor applied before quantisation: the next layer's input
            scale.
        max_query_len: see ``paged_attention``.
        max_seq_len: see ``paged_attention``.
        scale: see ``paged_attention``.
        causal: see ``paged_attention``.
        window: see ``paged_attention``.
        soft_cap: see ``paged_attention``.
        sinks: see ``paged_attention``.
        k_scale: see ``paged_attention``.
        v_scale: see ``paged_attention``.
        counters: int32 ``(≥ B · Hkv,)``, zeros before and after the call: with these semaphores the
            last CTA of a decode merges split keys without a second launch. Not to be shared by
            concurrent calls.
        out: memory for ``data`` and ``scales`` to write; ``scales`` may belong to a taller operand
            that contains ``q``'s rows. None: new tensors.
        first_row: first row of ``q`` among the rows of ``scales``.
        batch_invariant: see ``paged_attention``.

    Returns:
        ``data`` uint8 ``(T, Hq, D/2)``; ``scales`` float8_e4m3fn in the blocked layout of an
        operand ``(M, Hq·D)``, ``(ceil(M/128), Hq·D/64, 32, 16)``, where the scales of other rows,
        including padding, stay unchanged; and ``lse`` as ``paged_attention``, off by up to 1.02e-4
        with a float8_e4m3fn cache and many rows, see ``paged_attention``.

    Raises:
        InvalidArgument: an argument that does not fit, named. The contents of tensors are
            checked on CPU only.
        NoKernelError: no kernel for this device.
    """
    check_dtype("q", q, DTYPES)
    if out is None:
        out = new_nvfp4_rows(q) if q.ndim == 3 else (q, q)  # the op refuses such q
    check_pair("out", out)
    lse = called(_paged_attention_quantized, q, max_seq_len=KEY_MULTIPLE)(
        *out, q, kv_cache, block_table, seq_lens, query_start, sinks, k_scale, v_scale, input_scale,
        first_row, max_query_len, max_seq_len, scale, causal, window, soft_cap,
        counters, batch_invariant,
    )  # fmt: skip
    return *out, lse


@torch.library.custom_op(
    "nvfp4::paged_attention_quantized", mutates_args=("out", "out_scales", "counters")
)
def _paged_attention_quantized(
    out: Tensor,
    out_scales: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    input_scale: Tensor,
    first_row: int,
    max_query_len: int,
    max_seq_len: int,
    scale: float | None,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    counters: Tensor | None,
    batch_invariant: bool,
) -> Tensor:
    tensors = q, kv_cache, block_table, seq_lens, query_start, sinks, k_scale, v_scale
    scoring = scoring_of(q, scale, causal, window, soft_cap, batch_invariant)
    mode = check_paged(*tensors, max_query_len, max_seq_len, scoring)
    check_counters(counters, q, kv_cache, seq_lens)
    rows = Nvfp4Rows(out, out_scales, input_scale, first_row)
    rows.check(*q.shape)
    check_same_device(q=q, out=out)
    kernel = QUANTIZED_KERNELS.select(q.device, mode, batch_invariant).load()
    return kernel(*tensors, max_query_len, max_seq_len, scoring, counters, rows)[1]


@_paged_attention_quantized.register_fake
def _(out: Tensor, out_scales: Tensor, q: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape[:-1], dtype=torch.float32)
