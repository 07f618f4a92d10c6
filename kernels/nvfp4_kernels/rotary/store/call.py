"""Arguments of ``rotary_store`` as one value for the check, the reference and the launch."""

from typing import NamedTuple

from torch import Tensor


class RotaryStoreCall(NamedTuple):
    """Arguments of ``op.rotary_store``, which explains them; ``out`` is never None."""

    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    cos_sin_cache: Tensor
    kv_cache: Tensor
    slot_mapping: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    neox: bool
    eps: float | None
