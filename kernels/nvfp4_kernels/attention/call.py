"""Arguments of the attention ops, packed as one value for checks, references and launches."""

from typing import NamedTuple

from torch import Tensor

from nvfp4_kernels.attention.scoring import Scoring
from nvfp4_kernels.formats.nvfp4_rows import Nvfp4Rows
from nvfp4_kernels.rotary.store.call import RotaryStoreCall


class AttentionCall(NamedTuple):
    """Arguments of ``attention``."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    query_start: Tensor | None
    key_start: Tensor | None
    max_query_len: int | None
    max_key_len: int | None
    scale: float | None
    causal: bool
    window: int | None
    soft_cap: float | None

    @property
    def scoring(self) -> Scoring:
        """Softmax scale, soft cap and masks."""
        return Scoring(scale_of(self.q, self.scale), self.causal, self.window, self.soft_cap)


class PagedCall(NamedTuple):
    """Arguments of ``paged_attention``; ``out``: memory for the result, or None."""

    q: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start: Tensor
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    max_query_len: int
    max_seq_len: int
    scale: float | None
    causal: bool
    window: int | None
    soft_cap: float | None
    counters: Tensor | None
    batch_invariant: bool
    out: Tensor | Nvfp4Rows | None = None

    @property
    def scoring(self) -> Scoring:
        """Softmax scale, soft cap and masks."""
        return Scoring(
            scale_of(self.q, self.scale),
            self.causal,
            self.window,
            self.soft_cap,
            self.batch_invariant,
        )


class SparseCall(NamedTuple):
    """Arguments of ``sparse_attention``; ``out``: memory for the result, or None."""

    q: Tensor
    kv_cache: Tensor
    indices: Tensor
    lens: Tensor
    block_table: Tensor
    query_start: Tensor
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    scale: float | None
    soft_cap: float | None
    out: Tensor | None = None

    @property
    def scoring(self) -> Scoring:
        """Softmax scale and soft cap; the lists of keys are the only mask."""
        return Scoring(scale_of(self.q, self.scale), causal=False, soft_cap=self.soft_cap)


class RotaryCall(NamedTuple):
    """Arguments of ``rotary_attention``.

    ``out_scales`` and ``input_scale``: block scales and global scale of an NVFP4 result, or None.
    """

    out: Tensor
    out_scales: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start: Tensor
    slot_mapping: Tensor
    positions: Tensor
    cos_sin_cache: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    input_scale: Tensor | None
    neox: bool
    eps: float | None
    first_row: int
    max_query_len: int
    max_seq_len: int
    scale: float | None
    window: int | None
    soft_cap: float | None
    counters: Tensor | None
    settled: bool
    batch_invariant: bool

    @property
    def result(self) -> Tensor | Nvfp4Rows:
        """Memory for the result."""
        if self.out_scales is None or self.input_scale is None:
            return self.out
        return Nvfp4Rows(self.out, self.out_scales, self.input_scale, self.first_row)

    @property
    def paged(self) -> PagedCall:
        """Arguments of ``paged_attention`` for the rotated queries."""
        return PagedCall(
            self.q,
            self.kv_cache,
            self.block_table,
            self.seq_lens,
            self.query_start,
            self.sinks,
            self.k_scale,
            self.v_scale,
            self.max_query_len,
            self.max_seq_len,
            self.scale,
            causal=True,
            window=self.window,
            soft_cap=self.soft_cap,
            counters=self.counters,
            batch_invariant=self.batch_invariant,
            out=self.result,
        )

    @property
    def store(self) -> RotaryStoreCall:
        """Arguments of ``rotary_store``: rotation of queries and keys, store of keys and values."""
        return RotaryStoreCall(
            self.out,
            self.q,
            self.k,
            self.v,
            self.positions,
            self.cos_sin_cache,
            self.kv_cache,
            self.slot_mapping,
            self.q_norm,
            self.k_norm,
            self.k_scale,
            self.v_scale,
            self.neox,
            self.eps,
        )


def scale_of(q: Tensor, scale: float | None) -> float:
    """Factor of ``q · k``: ``scale`` or, if None, D ** -0.5; any D is accepted, even 0."""
    return max(1, q.shape[-1:].numel()) ** -0.5 if scale is None else scale
