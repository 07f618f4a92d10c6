"""Plans of batch-invariant kernels: one order of sums for any batch, and a server's kernels."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from nvfp4_kernels.attention.sm100.choose import AttentionProblem
from nvfp4_kernels.attention.sm100.choose import choose_config as choose_attention
from nvfp4_kernels.gemm.sm90 import choose as sm90
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig as Sm90Epilogue
from nvfp4_kernels.gemm.sm100 import choose as sm100
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig as Sm100Epilogue
from nvfp4_kernels.precompile.attention_sm100 import attention_kernels
from nvfp4_kernels.precompile.linear_sm90 import weight_only_kernels
from nvfp4_kernels.precompile.linear_sm100 import block_scaled_kernels
from nvfp4_kernels.precompile.model import Attention, Layer, Model
from nvfp4_kernels.precompile.norm_sm100 import norm_kernels
from nvfp4_kernels.quantize.rms_norm.choose import choose_config as choose_norm

TOKENS = (*range(1, 70), 100, 128, 129, 256, 300, 512, 1000, 1024, 2048, 4096)
LAYERS = {
    "qkv": Layer("qkv", 6144, 4096, shards=3),
    "o": Layer("o", 4096, 4096),
    "down": Layer("down", 4096, 14336),
    "gate and up": Layer("gate and up", 14336, 4096, gate_up=True),
    "small": Layer("small", 133, 48),
    "small gate and up": Layer("small gate and up", 96, 352, gate_up=True),
    "tiny": Layer("tiny", 128, 128),
}
EVERY_LAYER = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
Choose = Callable[..., tuple[Any, Any]]


def sm100_choice(choose: Choose, layer: Layer, m: int) -> tuple[Any, Any]:
    problem = sm100.Problem(m, layer.n, layer.k, 1, layer.weights)
    return choose(problem, Sm100Epilogue(shards=layer.shards))


def sm90_choice(choose: Choose, layer: Layer, m: int) -> tuple[Any, Any]:
    problem = sm90.Problem(m, layer.n, layer.k, layer.weights)
    return choose(problem, Sm90Epilogue(shards=layer.shards))


@EVERY_LAYER
def test_one_tile_on_sm_100(layer: Layer) -> None:
    one = {sm100_choice(sm100.choose_batch_invariant, layer, m) for m in TOKENS}
    assert len(one) == 1
    assert len({sm100_choice(sm100.choose_config, layer, m) for m in TOKENS}) > 1, "why a mode"


@EVERY_LAYER
def test_one_order_of_sums_on_sm_90(layer: Layer) -> None:
    """The tile depends on the tokens; the places where K is split do not."""

    def orders(choose: Choose) -> set[Any]:
        tiles = [sm90_choice(choose, layer, m)[0] for m in TOKENS]
        return {(cuts(tile, layer.k), tile.slices) for tile in tiles}

    assert len(orders(sm90.choose_batch_invariant)) == 1
    assert layer.name not in ("o", "down") or len(orders(sm90.choose_config)) > 1, "why a mode"
    tokens = {sm90_choice(sm90.choose_batch_invariant, layer, m)[0].tokens for m in TOKENS}
    assert tokens >= {8, 16, 32, 64}


def cuts(tile: Any, k: int) -> tuple[int, ...]:
    """Indices of the elements of K at which splits end."""
    parts = tile.split_k * tile.parts_in_turn
    steps = -(-k // (64 * tile.k_tiles))
    return tuple(64 * tile.k_tiles * (part * steps // parts) for part in range(1, parts))


@pytest.mark.parametrize(
    ("name", "parts"), [("o", 2), ("down", 2), ("gate and up", 1), ("tiny", 1)]
)
def test_k_is_cut_where_sms_would_be_idle(name: str, parts: int) -> None:
    layer = LAYERS[name]
    problem = sm90.Problem(1, layer.n, layer.k, layer.weights)
    assert sm90.invariant_parts(problem) == parts
    few, many = (sm90_choice(sm90.choose_batch_invariant, layer, m)[0] for m in (1, 4096))
    assert (few.split_k, few.parts_in_turn) == (parts, 1)
    assert (many.split_k, many.parts_in_turn) == (1, parts)


@EVERY_LAYER
def test_parts_of_k_are_added_in_an_order_of_the_weights(layer: Layer) -> None:
    """Split-K partials have a fixed order; with swap_ab a CTA starts with its own partial."""
    tile, _ = sm100_choice(sm100.choose_batch_invariant, layer, 1)
    assert tile.split_k == 1 or not tile.swap_ab
    assert not tile.swap_ab or tile.columns >= sm100.MAX_FEW_TOKENS, "those have one tile of tokens"


@EVERY_LAYER
def test_the_cost_is_bounded(layer: Layer) -> None:
    """A batch-invariant tile costs less than 2.5 times the best tile, by the chooser's estimate."""
    invariant = sm100_choice(sm100.choose_batch_invariant, layer, 1)
    for m in sm100.INVARIANT_TOKENS:
        problem = sm100.Problem(m, layer.n, layer.k, 1, layer.weights)
        best = sm100.choose_config(problem, Sm100Epilogue(shards=layer.shards))
        assert sm100.cost_in_layer(problem, *invariant) < 2.5 * sm100.cost_in_layer(problem, *best)


def test_norms() -> None:
    assert len({choose_norm(m, 4096, batch_invariant=True) for m in TOKENS}) == 1
    assert len({choose_norm(m, 4096) for m in TOKENS}) > 1


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("fp8", [False, True])
def test_attention(head_dim: int, fp8: bool) -> None:
    def chosen(batch_invariant: bool) -> set[Any]:
        return {
            choose_attention(
                AttentionProblem(
                    batch, queries, keys, 8, 4, head_dim, fp8, batch_invariant=batch_invariant
                )
            )
            for batch in (1, 16, 64)
            for queries in (1, 2, 40, 4096)
            for keys in (40, 4096, 1 << 17)
        }

    [(tile, splits)] = chosen(True)
    assert (splits, tile.warp_split_kv) == (1, False)
    assert len(chosen(False)) > 1


def test_what_a_server_compiles() -> None:
    layers = tuple(LAYERS[name] for name in ("qkv", "o", "gate and up"))
    model = Model("", "bfloat16", layers)
    blackwell = block_scaled_kernels(
        model, max_tokens=300, activations=("static",), batch_invariant=True
    )
    assert sum(spec.op in ("gemm", "silu_mul_gemm") for spec in blackwell) == len(layers)
    hopper = {
        spec.fields for spec in weight_only_kernels(model, max_tokens=300, batch_invariant=True)
    }
    for layer, m in itertools.product(layers, range(1, 301)):
        assert sm90_choice(sm90.choose_batch_invariant, layer, m) in hopper
    norms = norm_kernels(
        "bfloat16", "bfloat16", 4096, max_tokens=4096, per_token=True, batch_invariant=True
    )
    assert len(norms) == 2  # with a residual and without
    attention = attention_kernels(
        Attention(32, 8, 128), "bfloat16", caches=("auto",), rotates=True, batch_invariant=True
    )
    assert {spec.fields[0].batch_invariant for spec in attention} == {True}
    assert [spec.fields[1].rotation is None for spec in attention] == [True, False]
