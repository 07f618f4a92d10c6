"""Stand-in for FlashAttention 3, with its arguments and formula, for machines without it."""

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    seqused_k: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: list[int],
    softcap: float,
    block_table: Tensor,
    out: Tensor,
    fa_version: int,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> None:
    """Write FlashAttention's result for a paged cache to ``out``, computed slowly in float64.

    Of E4M3 queries, keys and values, each with a descale ``(sequences, Hkv)``.
    """
    descales = q_descale, k_descale, v_descale
    assert {x.dtype for x in (q, k, v)} == {q.dtype}
    assert all((x is not None) == (q.dtype == torch.float8_e4m3fn) for x in descales)
    assert all(x is None or x.shape == (len(seqused_k), k.shape[2]) for x in descales)
    assert fa_version == 3
    assert causal
    starts = cu_seqlens_q.tolist()
    for row, length in enumerate(seqused_k.tolist()):
        queries = q[starts[row] : starts[row + 1]].double()
        assert len(queries) <= max_seqlen_q
        assert length <= max_seqlen_k
        pages = block_table[row, : -(-length // k.shape[1])].long()
        keys, values = (x[pages].flatten(0, 1)[:length].double() for x in (k, v))
        group = q.shape[1] // k.shape[2]
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        queries, keys, values = (
            x if scale is None else x * scale[row].double().repeat_interleave(group)[:, None]
            for x, scale in zip((queries, keys, values), descales, strict=True)
        )
        logits = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
        if softcap:
            logits = softcap * (logits / softcap).tanh()
        position = torch.arange(length - len(queries), length)[:, None]
        ahead = torch.arange(length) - position
        hidden = ahead > 0
        if window_size[0] >= 0:
            assert window_size[1] == 0
            hidden |= ahead < -window_size[0]
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        out[starts[row] : starts[row + 1]] = torch.einsum("hqk,khd->qhd", weights, values)
