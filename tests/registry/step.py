"""One step of a built model with the plugin's attention: a short prompt in a paged cache."""

from typing import Any

import torch
from torch import Tensor

from tests.registry.session import Built

TOKENS, PAGE = 20, 16  # more than a page
IDS = (torch.arange(TOKENS) * 7) % 50 + 3


class NotOursError(TypeError):
    """Error for a model that has a stateful layer, such as attention, that is not the plugin's."""


def run(built: Built) -> Tensor:
    """Hidden states ``(TOKENS, hidden)`` of a prompt, computed by a model on CPU.

    Raises:
        NotOursError: a layer needs the metadata of another backend.
    """
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import create_forward_context, override_forward_context

    positions = torch.arange(TOKENS)
    metadata = _metadata(built.config, positions)
    context = create_forward_context(
        metadata, built.config, slot_mapping=dict.fromkeys(metadata, positions)
    )
    model: Any = built.model
    with set_current_vllm_config(built.config), override_forward_context(context), torch.no_grad():
        out = model(input_ids=IDS, positions=positions)
    return out[0] if isinstance(out, tuple) else out


def _metadata(config: Any, positions: Tensor) -> dict[str, Any]:
    """Metadata of each attention layer, with pages allocated for the layer."""
    from vllm_fp4_plugin.attention.impl import PagedAttentionImpl
    from vllm_fp4_plugin.attention.metadata import PagedAttentionMetadata, Part

    layers, found = config.compilation_config.static_forward_context, {}
    with_state = {n: layer for n, layer in layers.items() if hasattr(layer, "kv_cache")}
    for name, layer in with_state.items():
        impl = getattr(layer, "impl", None)
        if type(impl) is not PagedAttentionImpl:
            raise NotOursError(f"{name} is {type(impl or layer).__name__}")
        dtype = torch.uint8 if impl.is_fp8 else torch.bfloat16
        pages = -(-TOKENS // PAGE)
        layer.kv_cache = torch.zeros(
            pages, impl.num_kv_heads, PAGE, 2 * impl.head_size, dtype=dtype
        )
        part = Part(
            tokens=slice(0, TOKENS),
            query_start=torch.tensor([0, TOKENS], dtype=torch.int32),
            seq_lens=torch.tensor([TOKENS], dtype=torch.int32),
            block_table=torch.arange(pages, dtype=torch.int32).unsqueeze(0),
            max_query_len=TOKENS,
            max_seq_len=TOKENS,
        )
        counters = torch.zeros(impl.num_kv_heads, dtype=torch.int32)
        found[name] = PagedAttentionMetadata([part], positions, counters, positions)
    for layer in with_state.values():
        owner = layer.impl.kv_sharing_target_layer_name
        if owner is not None:
            layer.kv_cache = layers[owner].kv_cache
    return found
