"""Shrinking of configs: a config class with small sizes and one layer of each kind."""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from transformers import PreTrainedConfig

VOCAB_SIZE = 320

# Fields of language models, under the names of all classes.
TEXT: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "dim"), 128),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"), 256),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp"), 256),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "num_moe_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "padded_vocab_size"), VOCAB_SIZE),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length", "n_ctx"), 256),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "max_seq_len"), 64),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 16),
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "qk_head_dim": 192,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 64,
    "first_k_dense_replace": 1,
    "shared_intermediate_size": 64,
}

# Fields of vision and audio towers.
TOWER: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "width", "dim"), 64),
    **dict.fromkeys(("num_attention_heads", "num_heads", "attention_heads", "heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
}

_DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "depth",
    "encoder_layers",
    "decoder_layers",
)
_TOWERS = ("vision", "visual", "audio", "speech", "image", "vit", "encoder", "projector", "vq")


def is_tower(name: str) -> bool:
    """Whether a sub-config of this name belongs to a tower, not to a language model."""
    return any(part in name for part in _TOWERS) and "text" not in name


def default_of(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Config of a class with that class's own defaults, not those of its remote-code ancestor."""
    return config_class()


def fields(config_class: type[PreTrainedConfig], tower: bool = False) -> dict[str, Any]:
    """Arguments that make a class's config small, sub-configs included as dictionaries."""
    default = default_of(config_class)
    sizes = TOWER if tower else TEXT
    small = {name: sizes[name] for name in sizes if isinstance(_get(default, name), int)}
    small |= _depths(default, tower)
    small |= dict(_tokens(default))
    for name, kind in _sub_configs(default):
        small[name] = fields(kind, tower or is_tower(name)) | {"model_type": kind.model_type}
    return small


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Config with changes applied, also inside sub-configs; ``None`` counts as a value."""
    result = dict(config)
    for name, value in changes.items():
        inner = result.get(name)
        result[name] = (
            merged(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
        )
    return result


def _get(config: PreTrainedConfig, name: str) -> Any:
    value = vars(config).get(name)  # no property, and nothing under a second name
    return None if isinstance(value, bool) else value


def _depths(default: PreTrainedConfig, tower: bool) -> dict[str, Any]:
    """Numbers of layers, with each per-layer list reduced to its distinct entries."""
    small: dict[str, Any] = {}
    for name in _DEPTHS:
        depth = _get(default, name)
        if not isinstance(depth, int):
            continue
        lists = {
            each: value
            for each, value in vars(default).items()
            if isinstance(value, list) and len(value) == depth and each.endswith(("types", "type"))
        }
        kinds = [list(dict.fromkeys(value)) for value in lists.values()]
        shortest = 1 if tower else 2
        least = max([shortest, *map(len, kinds)])
        small[name] = least
        for each, found in zip_longest(lists, kinds):
            small[each] = (found + [found[-1]] * least)[:least]
    return small


def _tokens(default: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """Token ids that exceed the small vocabulary, moved into the vocabulary."""
    for name, value in vars(default).items():
        is_id = name.endswith(("token_id", "token_index", "_token")) and isinstance(value, int)
        if is_id and not isinstance(value, bool) and value >= VOCAB_SIZE:
            yield name, value % 256


def _sub_configs(
    default: PreTrainedConfig,
) -> Iterator[tuple[str, type[PreTrainedConfig]]]:
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            yield name, type(value)
