"""Kernels that a model's attention needs on sm_90, for any batch. Imports no CuTe.

The kernels run decode-only steps; vLLM runs all other steps.
"""

from itertools import product

from nvfp4_kernels.attention.decode.kernels import HEAD_DIMS, MAX_GROUP
from nvfp4_kernels.attention.decode.sm90.choose import choose_config
from nvfp4_kernels.attention.decode.sm90.tile import DecodeTile, Variant
from nvfp4_kernels.precompile.model import PAGE_SIZE, Attention, Dtype
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.sm90.limits import SMS

_LENGTHS = [1 << power for power in range(21)]  # keys, between which no choice changes


def decode_kernels(
    attention: Attention,
    dtype: Dtype,
    *,
    page_size: int = PAGE_SIZE,
    fp8: bool = False,
    sms: int = SMS,
) -> dict[KernelSpec, list[str]]:
    """Decode kernels for all batch sizes and lengths; empty if the attention is unsupported.

    ``fp8``: whether the cache is E4M3; otherwise it has ``dtype``.
    """
    group = attention.query_heads // attention.kv_heads
    if (
        attention.head_dim not in HEAD_DIMS["sm_90", "fp8_kv" if fp8 else "float"]
        or group > MAX_GROUP
    ):
        return {}  # served by another backend of vLLM's, as it says at start
    found = []
    for window in attention.windows:
        variant = Variant(
            dtype,
            page_size,
            window=window > 0,
            soft_cap=attention.soft_cap,
            sinks=attention.sinks,
        )
        for tile in _tiles(attention, group, window, sms, fp8):
            found.append(decode_spec(tile, variant))
    return {spec: ["attention"] for spec in dict.fromkeys(found)}


def decode_spec(tile: DecodeTile, variant: Variant) -> KernelSpec:
    """Spec of a decode attention kernel."""
    target = "nvfp4_kernels.attention.decode.sm90.kernel:DecodeAttentionSm90"
    return KernelSpec("decode_attention", target, (tile, variant))


def _tiles(attention: Attention, group: int, window: int, sms: int, fp8: bool) -> list[DecodeTile]:
    """Tiles for all lengths, and for batches from one sequence to a full GPU."""
    head_dim = attention.head_dim
    unsplit = (
        DecodeTile(head_dim, group, fp8=fp8).ctas_per_sm * sms
    )  # sequences, which fill the GPU
    lengths = sorted({min(keys, window or keys) for keys in _LENGTHS}, reverse=True)
    chosen = [
        choose_config(batch, attention.kv_heads, group, head_dim, keys, sms, fp8=fp8)
        for batch, keys in product(range(1, unsplit + 1), lengths)
    ]
    return list(dict.fromkeys(chosen))
