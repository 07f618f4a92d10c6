"""Replacements for functions of DeepSeek V3.2's CUDA layer, which bypasses ``SparseAttnIndexer``.

``vllm.models.deepseek_v32.attention`` builds an indexer, but calls three functions instead:
``fused_norm_rope`` computes keys and stores FP8, ``fused_q`` computes FP8 queries, and
``sparse_attn_indexer`` scores. The layer looks up these names at each call; this module replaces
them with functions of the same signature, which call vLLM's functions for all but the indexer's
part. If the key format is FP8, vLLM's functions still compute queries and store keys, except where
they write a key's scale as exponents: our kernels read float32 scales.
"""

import inspect
import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import sparse_attn_indexer as scoring

from vllm_fp4_plugin.indexer import choice
from vllm_fp4_plugin.indexer.selection import KeySelector

LAYER = "vllm.models.deepseek_v32.attention"


def install(selector: KeySelector | None) -> None:
    """Replace the functions of the layer's module, if the module is imported.

    ``sparse_attn_indexer`` is always replaced. ``fused_norm_rope``, which then stores keys with
    ``selector``, and ``fused_q`` are replaced if vLLM's functions cannot store keys in the
    selector's format; otherwise, and for None, vLLM's functions are restored. All layers use the
    format of the last selector: the option is global to an engine.
    """
    layer: Any = sys.modules.get(LAYER)
    if layer is None:
        return
    from vllm.models.deepseek_v32.common import kernels

    layer.sparse_attn_indexer = sparse_attn_indexer
    if selector is None or _left_to_vllm(selector):
        layer.fused_norm_rope, layer.fused_q = kernels.fused_norm_rope, kernels.fused_q
    else:
        layer.fused_norm_rope = partial(fused_norm_rope, selector, kernels.fused_norm_rope)
        layer.fused_q = partial(fused_q, kernels.fused_q)


def _left_to_vllm(selector: KeySelector) -> bool:
    """Whether vLLM's functions store keys in the format that our kernels read."""
    return selector.fmt.name == "fp8" and not choice.has_exponent_scales()


_INDEX_K = 9  # index in fused_norm_rope's arguments
_OUT = list(inspect.signature(scoring.sparse_attn_indexer).parameters).index("topk_indices_buffer")


def sparse_attn_indexer(
    hidden_states: Tensor,
    k_cache_prefix: str,
    kv_cache: Tensor,
    q_quant: Tensor,
    q_scale: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Select keys for a step's tokens; the step's keys are in the cache already.

    The signature is that of vLLM's function of the same name, which is called for a layer that our
    kernels do not serve.
    """
    given = (hidden_states, k_cache_prefix, kv_cache, q_quant, q_scale, *args)
    cache_layer = get_forward_context().no_compile_layers.get(k_cache_prefix)
    if getattr(cache_layer, "key_selector", None) is None:
        return scoring.sparse_attn_indexer(*given, **kwargs)
    _, weights, *_ = args
    torch.ops.nvfp4_tc.select_keys(q_quant, q_scale, None, weights, given[_OUT], k_cache_prefix)
    return given[_OUT]


def fused_norm_rope(
    selector: KeySelector,
    theirs: Any,
    *args: Any,
    indexer_k_cache: Tensor | None = None,
    indexer_slot_mapping: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run vLLM's function ``theirs`` with 16-bit keys as output; store them with ``selector``.

    Without ``indexer_k_cache``, only run ``theirs``.
    """
    if indexer_k_cache is None:  # profile run, or indices of another layer
        return theirs(*args, **kwargs)
    k = kwargs["index_k_out"] = torch.empty_like(args[_INDEX_K])
    q_c = theirs(*args, **kwargs)
    slots = kwargs["slot_mapping"] if indexer_slot_mapping is None else indexer_slot_mapping
    selector.store(k, indexer_k_cache, slots[: len(k)])
    return q_c


class QueryCall(NamedTuple):
    """Positional arguments of vLLM's ``fused_q``, in order; ``index_…`` are the indexer's."""

    positions: Tensor
    q_pe: Tensor
    q_pe_cos_sin_cache: Tensor
    index_q: Tensor | None
    index_q_cos_sin_cache: Tensor | None
    ql_nope: Tensor
    q_scale: Tensor
    index_weights: Tensor | None
    softmax_scale: float
    head_scale: float


def fused_q(
    theirs: Any,
    *arguments: Any,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run vLLM's function ``theirs`` without the indexer's part, which is computed in 16 bits.

    Returns:
        The indexer's rotated queries, in the dtype of the model; the indexer's weights, float32,
        multiplied by the softmax and head scales; and MLA's queries, from ``theirs``. Without an
        indexer, all results are from ``theirs``.
    """
    call = QueryCall(*arguments)
    q, cos_sin, weights = call.index_q, call.index_q_cos_sin_cache, call.index_weights
    without = call._replace(index_q=None, index_q_cos_sin_cache=None, index_weights=None)
    unused_q, unused_weights, mqa_q = theirs(*without, has_indexer=False, **kwargs)
    if q is None or cos_sin is None or weights is None:
        return unused_q, unused_weights, mqa_q
    q = rotated(q, cos_sin[call.positions], interleaved=index_rope_interleave)
    return q, weights.float() * (call.softmax_scale * call.head_scale), mqa_q


def rotated(x: Tensor, cos_sin: Tensor, *, interleaved: bool) -> Tensor:
    """Apply RoPE to the first R elements of each vector.

    Args:
        x: ``(T, H, D)``.
        cos_sin: ``(T, R)``: R/2 cosines, then R/2 sines.
        interleaved: whether the elements of a pair are adjacent instead of R/2 apart.
    """
    turned, rest = x.split([cos_sin.shape[-1], x.shape[-1] - cos_sin.shape[-1]], dim=-1)
    cos, sin = cos_sin.float().unsqueeze(1).chunk(2, dim=-1)
    pair = -1 if interleaved else -2
    shape = (-1, 2) if interleaved else (2, -1)
    first, second = turned.float().unflatten(-1, shape).unbind(pair)
    pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=pair)
    return torch.cat([pairs.flatten(-2).to(x.dtype), rest], dim=-1)
