"""Arguments of ``decode_attention`` as one value."""

from typing import NamedTuple

from torch import Tensor

from nvfp4_kernels.attention.call import scale_of
from nvfp4_kernels.attention.scoring import Scoring


class DecodeCall(NamedTuple):
    """Arguments of ``decode_attention``."""

    out: Tensor
    q: Tensor
    key: Tensor
    value: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    scale: float | None
    window: int | None
    soft_cap: float | None

    @property
    def scoring(self) -> Scoring:
        """Softmax scale, soft cap and masks."""
        return Scoring(
            scale_of(self.q, self.scale), causal=True, window=self.window, soft_cap=self.soft_cap
        )
