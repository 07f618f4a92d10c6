"""Kernels of residual norms and rotary embeddings on sm_90, for any batch. Imports no CuTe."""

from nvfp4_kernels.device.row_vectors.tile import VECTOR
from nvfp4_kernels.norm.choose import choose_config as choose_norm
from nvfp4_kernels.norm.tile import MAX_K
from nvfp4_kernels.precompile.model import Attention, Dtype
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.rotary.choose import MANY_TOKENS
from nvfp4_kernels.rotary.choose import choose_config as choose_rotary
from nvfp4_kernels.rotary.tile import MAX_HEAD_DIM, PIECE


def norm_rotary_kernels(
    hidden: int, attention: Attention, dtype: Dtype
) -> dict[KernelSpec, list[str]]:
    """Kernels for a model's sizes; vLLM runs unsupported sizes.

    Args:
        hidden: hidden size.
        attention: attention layers, with the heads on one GPU.
        dtype: dtype of activations.
    """
    found: dict[KernelSpec, list[str]] = {}
    if hidden % VECTOR == 0 and hidden <= MAX_K:
        norm = KernelSpec(
            "add_rms_norm",
            "nvfp4_kernels.norm.sm90:AddRmsNormSm90",
            (dtype, choose_norm(hidden)),
        )
        found[norm] = ["norms"]
    head_dim, rotary_dim = attention.head_dim, attention.rotary_dim or attention.head_dim
    fits = head_dim % PIECE == 0 and head_dim <= MAX_HEAD_DIM and rotary_dim % (2 * PIECE) == 0
    heads = attention.query_heads + attention.kv_heads
    for tokens in (1, MANY_TOKENS) if fits else ():
        tile = choose_rotary(tokens, heads, head_dim, rotary_dim)
        target = "nvfp4_kernels.rotary.sm90:RotaryEmbeddingSm90"
        found[KernelSpec("rotary_embedding", target, (dtype, tile))] = ["rotary embedding"]
    return found
