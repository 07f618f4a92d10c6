"""Ignore lists: names, wildcards, regexes, fused names, and refused mixtures."""

import pytest

from vllm_fp4_plugin.ignore import (
    InvalidPattern,
    MixedShards,
    check_pattern,
    covered,
    matches,
    shard_names,
)

PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
ATTENTION = "model.layers.3.self_attn"


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("lm_head", "lm_head"),
        (f"{ATTENTION}.o_proj", f"{ATTENTION}.o_proj"),
        (f"{ATTENTION}.o_proj", "self_attn.o_proj"),
        (f"{ATTENTION}.o_proj", ATTENTION),
        (f"{ATTENTION}.o_proj", "model.layers.3*"),
        (f"{ATTENTION}.o_proj", "*.o_proj"),
        (f"{ATTENTION}.o_proj", r"re:.*layers\.[0-3]\..*"),
        ("model.vision_tower.blocks.0.fc1", "vision_tower"),
    ],
)
def test_pattern_covers_name(name: str, pattern: str) -> None:
    assert matches(name, [pattern]) == pattern


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("model.layers.0.mlp.gate_up_proj", "mlp.gate"),  # a prefix of a part is no part
        ("model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.gate"),
        ("model.layers.10.mlp.down_proj", "model.layers.1"),
        ("model.layers.1.mlp.down_proj", "re:layers"),  # regexes match from the start
        ("lm_head", "head"),
    ],
)
def test_pattern_leaves_name(name: str, pattern: str) -> None:
    assert matches(name, [pattern]) is None


def test_fused_layer_is_covered_by_all_its_shards() -> None:
    patterns = [f"{ATTENTION}.{p}_proj" for p in "qkv"]
    assert covered(f"{ATTENTION}.qkv_proj", patterns, PACKED) == patterns[0]


def test_fused_layer_is_covered_by_its_own_name() -> None:
    assert covered(f"{ATTENTION}.qkv_proj", ["self_attn.qkv_proj"], PACKED) is not None


def test_fused_layer_is_covered_by_a_wildcard() -> None:
    assert covered(f"{ATTENTION}.qkv_proj", ["model.layers.3.*"], PACKED) is not None


def test_uncovered_layer() -> None:
    assert covered("model.layers.0.mlp.gate_up_proj", ["lm_head"], PACKED) is None


def test_some_shards_are_refused() -> None:
    with pytest.raises(MixedShards, match=r"gate_up_proj: .* only .*up_proj of its shards"):
        covered("model.layers.0.mlp.gate_up_proj", ["*.up_proj"], PACKED)


def test_what_is_no_regex_is_refused() -> None:
    for pattern in ("re:.*[qkv]_proj", "[", "*.mlp.*"):
        check_pattern("--ignore", pattern)
    with pytest.raises(InvalidPattern, match=r"--ignore: 're:\(a' is no regular expression \(miss"):
        check_pattern("--ignore", "re:(a")


def test_shard_names() -> None:
    assert shard_names("a.mlp.gate_up_proj", PACKED) == ["a.mlp.gate_proj", "a.mlp.up_proj"]
    assert shard_names("a.mlp.down_proj", PACKED) == ["a.mlp.down_proj"]
    assert shard_names("qkv_proj", PACKED) == ["q_proj", "k_proj", "v_proj"]
