"""Linear layers with activations as sums of NVFP4 terms: plans, and results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.utils.torch_utils import set_default_torch_dtype

from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor, global_scale_of, row_global_scales
from nvfp4_kernels.formats.terms import decode_terms, quantize_terms
from tests.test_plugin.linear.test_linear_layers import (
    BF16_ROUNDING,
    GAINS,
    LAYERS,
    Mlp,
    checkpoint,
    expected_output,
    finish,
    load,
    quantised_shards,
    tensors_on_disk,
)
from vllm_fp4_plugin.arithmetic.requested_terms import RequestedTerms, requested_terms
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.options import InvalidOption, Options

SCALE = torch.tensor(0.01)
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def option(vllm_config: Any, terms: Any, **others: Any) -> None:
    """Set ``activation_terms``, or leave the option out, and set other options."""
    given = others if terms is None else others | {"activation_terms": terms}
    vllm_config.additional_config = {"nvfp4_tc": given}


# --- the option -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("m.layers.0.mlp.down_proj", (4, "'re:.*layers.0.*down'")),
        ("m.layers.1.mlp.down_proj", (2, "'*.down_proj'")),
        ("m.layers.1.self_attn.o_proj", (1, "'self_attn'")),
        ("m.layers.1.self_attn.qkv_proj", (1, "'self_attn'")),
        ("m.layers.9.cross.qkv_proj", (3, "'q_proj'")),  # all three shards, each by its own
        ("m.layers.1.mlp.gate_up_proj", None),
    ],
)
def test_the_first_pattern_wins(name: str, expected: tuple[int, str] | None) -> None:
    terms = {
        "re:.*layers.0.*down": 4,
        "*.down_proj": 2,
        "self_attn": 1,
        "q_proj": 3,
        "k_proj": 3,
        "*.v_proj": 3,
        "m.layers.0": 4,
    }
    found = requested_terms(
        Options.parse({"activation_terms": terms}).activation_terms, name, PACKED
    )
    if expected is None:
        assert found is None
    else:
        count, pattern = expected
        assert found == RequestedTerms(count, f"activation_terms of {pattern} is {count}")


@pytest.mark.parametrize(
    ("terms", "each"),
    [
        ({"q_proj": 2}, "m.q_proj 2, m.k_proj the default, m.v_proj the default"),
        ({"q_proj": 2, "m": 3}, "m.q_proj 2, m.k_proj 3, m.v_proj 3"),
    ],
    ids=["some", "several"],
)
def test_shards_share_their_input(terms: dict[str, int], each: str) -> None:
    parsed = Options.parse({"activation_terms": terms}).activation_terms
    message = rf"activation_terms: gives shards of m\.qkv_proj several numbers \({each}\), must"
    with pytest.raises(InvalidOption, match=message):
        requested_terms(parsed, "m.qkv_proj", PACKED)


def test_patterns_that_cover_no_nvfp4_layer_are_told(vllm_config: Any) -> None:
    """Experts and layers in 16 bits do not use terms."""
    option(vllm_config, {"down_proj": 2, "q_proj": 3, "*.experts": 2, "fc": 2})
    config = Nvfp4TcConfig(checkpoint(ignore=("m.fc",)))
    config.packed_modules_mapping = {"qkv_proj": ["q_proj"]}
    for kind in ("row", "qkv", "column"):
        LAYERS[kind][0](config)
    config.get_quant_method(torch.nn.Identity(), "m.experts")
    assert [warning.partition(";")[0] for warning in config.startup.idle_patterns()] == [
        f"nvfp4_tc.activation_terms: {pattern!r} covers no NVFP4 linear layer of this process"
        for pattern in ("*.experts", "fc")
    ]


# --- the plan ---------------------------------------------------------------------------------

NO_W4A16 = "sm_100 has no W4A16 kernel"
NO_W4A4 = "sm_90 has no W4A4 kernel, activations stay 16-bit"
LESS = "3 terms lose less than bfloat16"
CPU, W4A16 = "nvfp4_gemm/reference (cpu)", "nvfp4_gemm_w4a16/reference (cpu)"
SM90, SM100 = "nvfp4_gemm_w4a16/wgmma (sm_90)", "nvfp4_gemm/block_scaled (sm_100)"
BY_PATTERN = {"up_proj": 4, "m.*": 2}

# Architecture, quantisation of the input, activation_terms: kernel, arithmetic, reason.
PLANS: list[tuple[str, str, Any, tuple[str, str, str]]] = [
    ("cpu", "16-bit", None, (W4A16, "W4A16", "")),
    ("cpu", "16-bit", 3, (CPU, "W4A4×3 per-token", "activation_terms is 3")),
    ("cpu", "16-bit", 1, (CPU, "W4A4 per-token", "activation_terms is 1")),
    ("cpu", "16-bit", {"up_proj": 4}, (W4A16, "W4A16", "")),
    ("cpu", "online 16-bit", None, (W4A16, "W4A16", "")),
    ("cpu", "online 16-bit", 2, (CPU, "W4A4×2 per-token", "activation_terms is 2")),
    ("cpu", "static", None, (CPU, "W4A4 static", "")),
    ("cpu", "static", 2, (CPU, "W4A4×2 static", "activation_terms is 2")),
    ("cpu", "static", BY_PATTERN, (CPU, "W4A4×2 static", "activation_terms of 'm.*' is 2")),
    ("cpu", "online", 2, (CPU, "W4A4×2 per-token", "activation_terms is 2")),
    ("sm_90", "16-bit", None, (SM90, "W4A16", "")),
    ("sm_90", "16-bit", 3, (SM90, "W4A16", NO_W4A4)),
    ("sm_90", "static", None, (SM90, "W4A16", NO_W4A4)),
    ("sm_90", "static", 3, (SM90, "W4A16", NO_W4A4)),
    ("sm_100", "16-bit", None, (SM100, "W4A4×3 per-token", f"{NO_W4A16}; {LESS}")),
    (
        "sm_100", "16-bit", 2,
        (SM100, "W4A4×2 per-token", f"{NO_W4A16}; activation_terms is 2"),
    ),
    (
        "sm_100", "16-bit", {"*.down_proj": 1},
        (SM100, "W4A4 per-token", f"{NO_W4A16}; activation_terms of '*.down_proj' is 1"),
    ),
    ("sm_100", "16-bit", {"up_proj": 1}, (SM100, "W4A4×3 per-token", f"{NO_W4A16}; {LESS}")),
    ("sm_100", "online 16-bit", None, (SM100, "W4A4×3 per-token", f"{NO_W4A16}; {LESS}")),
    ("sm_100", "static", None, (SM100, "W4A4 static", "")),
    ("sm_100", "static", 3, (SM100, "W4A4×3 static", "activation_terms is 3")),
    ("sm_100", "online", None, (SM100, "W4A4 per-token", "")),
]  # fmt: skip


def row(vllm_config: Any, activation: str, terms: Any) -> Any:
    """Row-parallel layer of a checkpoint or, for ``"online…"``, of a model quantised at load."""
    if activation.startswith("online"):
        online = {"activation": "16-bit"} if "16-bit" in activation else {}
        option(vllm_config, terms, **online)
        return LAYERS["row"][0](Nvfp4TcConfig())
    option(vllm_config, terms)
    return LAYERS["row"][0](Nvfp4TcConfig(checkpoint(weight_only=activation == "16-bit")))


@pytest.mark.parametrize(("arch", "activation", "terms", "expected"), PLANS)
def test_plan(
    arch: str, activation: str, terms: Any, expected: tuple[str, str, str], vllm_config: Any
) -> None:
    with standing_in("cpu", arch):
        method = row(vllm_config, activation, terms).quant_method
    [record] = [each for each in method.startup.report.layers if each.name == "m.down_proj"]
    assert (record.kernel, record.arithmetic, record.reason) == expected
    plan = method.plan
    assert plan.terms == (int(expected[1][5]) if "×" in expected[1] else 1)
    assert (plan.quantizer is None) == (expected[1] == "W4A16")
    product = method.startup.products.get("m.down_proj")
    if arch == "cpu":
        assert product is None
    else:
        assert product is not None
        assert (product.activation, product.terms) == (plan.activation, plan.terms)


def test_rows_too_long_for_a_scale_per_token(vllm_config: Any) -> None:
    """A row must fit in one CTA; Llama 405B's down projection needs two ranks."""
    option(vllm_config, None)
    config = Nvfp4TcConfig(checkpoint(weight_only=True))
    with standing_in("cpu", "sm_100"):
        RowParallelLinear(40960, 32, bias=False, quant_config=config, prefix="m.down_proj")
        refused = r"m.o_proj: K is 40976 on each rank, must be at most 40960 on sm_100 for a scale"
        with pytest.raises(UnsupportedCheckpoint, match=refused):
            RowParallelLinear(40976, 32, bias=False, quant_config=config, prefix="m.o_proj")


def test_lines_of_the_report(vllm_config: Any) -> None:
    """The number of terms does not change the bytes of weights."""
    option(vllm_config, None)
    config = Nvfp4TcConfig(checkpoint(weight_only=True))
    with standing_in("cpu", "sm_100"):
        for layer in range(2):
            RowParallelLinear(
                128, 64, bias=False, quant_config=config, prefix=f"m.layers.{layer}.o_proj"
            )
    size = 2 * (64 * 128 // 2 + 128 * 128 // 16 + 4)
    assert config.startup.report.lines() == [
        f"o_proj ×2: {SM100}, W4A4×3 per-token, {NO_W4A16}; {LESS}",
        f"weights: {size / (2 * 64 * 128):.4f} bytes per weight ({size:,} bytes) in layers on our "
        "NVFP4 kernels, "
        f"{size / (2 * 64 * 128):.4f} bytes per weight ({size:,} bytes) in all layers above, on "
        "this rank; norms, 16-bit embeddings and heads come on top",
    ]


def test_compiled_graphs_are_kept_by_their_terms(vllm_config: Any) -> None:
    hashes = []
    some: list[Any] = [None, 2, 3]
    for terms in some:
        row(vllm_config, "static", terms)
        hashes.append(vllm_config.compute_hash())
    assert len(set(hashes)) == len(some)


def test_compiled_graphs_are_kept_by_the_order_of_patterns(vllm_config: Any) -> None:
    """The order of patterns changes the terms, but not vLLM's hash of the options."""
    hashes, counts = [], []
    for terms in ({"m": 3, "down_proj": 2}, {"down_proj": 2, "m": 3}):
        option(vllm_config, terms)
        config = Nvfp4TcConfig(checkpoint())
        layers = [
            RowParallelLinear(K, 48, bias=False, quant_config=config, prefix=prefix)
            for prefix in ("m.down_proj", "m.o_proj", "other.down_proj")
        ]
        counts.append([layer.quant_method.plan.terms for layer in layers])
        hashes.append(vllm_config.compute_hash())
    assert counts == [[3, 3, 2], [2, 3, 2]]
    assert len(set(hashes)) == 2


def test_compiled_graphs_are_kept_by_default_terms(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default may differ in another version."""
    hashes = []
    for exact in (2, 3):
        monkeypatch.setattr("vllm_fp4_plugin.arithmetic.choice.EXACT_TERMS", exact)
        with standing_in("cpu", "sm_100"):
            row(vllm_config, "16-bit", None)
        hashes.append(vllm_config.compute_hash())
    assert len(set(hashes)) == 2


# --- results ----------------------------------------------------------------------------------

K, TOKENS = 96, 5


def sums(x: Tensor, scale: Tensor, terms: int) -> Tensor:
    """Activations as decoded sums of ``terms``, in float64."""
    values = decode_terms(*quantize_terms(x, scale, terms), terms).double()
    return values * (scale if scale.ndim == 0 else scale.unsqueeze(-1)).double()


def loaded(layer: Any, shards: list[Nvfp4Tensor], ids: list[Any], scale: Tensor) -> Any:
    for shard, shard_id in zip(shards, ids, strict=True):
        load(layer, tensors_on_disk(shard, scale, checkpoint()), shard_id)
    finish(layer)
    return layer


@pytest.mark.parametrize("terms", [1, 2, 3, 4])
@pytest.mark.parametrize("activation", ["static", "per-token"])
@pytest.mark.parametrize("kind", ["row", "qkv"])
def test_layer_multiplies_the_sums(
    kind: str, activation: str, terms: int, vllm_config: Any
) -> None:
    torch.manual_seed(2)
    x = torch.randn(TOKENS, K, dtype=torch.bfloat16)
    option(vllm_config, terms)
    build, rows, ids = LAYERS[kind]
    shards, scale = quantised_shards(rows, GAINS[: len(rows)]), global_scale_of(x)
    layer = build(Nvfp4TcConfig(checkpoint(weight_only=activation == "per-token")))
    out, _ = loaded(layer, shards, ids, scale)(x)
    values = sums(x, scale if activation == "static" else row_global_scales(x), terms)
    expected = expected_output(values, shards, None)
    torch.testing.assert_close(out.double(), expected, **BF16_ROUNDING)


@pytest.mark.parametrize("terms", [1, 3])
def test_fused_mlp_multiplies_the_sums(terms: int, vllm_config: Any) -> None:
    torch.manual_seed(2)
    x = torch.randn(TOKENS, K, dtype=torch.bfloat16)
    option(vllm_config, terms)
    mlp = Mlp(Nvfp4TcConfig(checkpoint(weight_only=True)), SiluAndMul)
    shards = quantised_shards([176] * 2, [1.0, 8.0])
    layer = loaded(mlp.gate_up_proj, shards, [0, 1], SCALE)
    assert layer.quant_method.plan.gate_up
    gate, up = expected_output(sums(x, row_global_scales(x), terms), shards, None).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(mlp(x).double(), expected, **BF16_ROUNDING)


def test_three_terms_lose_less_than_bfloat16(vllm_config: Any) -> None:
    """The layer is float16, whose own rounding is eight times finer than bfloat16's.

    The yardstick is the loss of a product with inputs rounded to bfloat16: one term loses more than
    10 times as much, three terms lose less.
    """
    torch.manual_seed(3)
    k, x = 512, torch.randn(64, 512, dtype=torch.float16)
    shards = quantised_shards([128], [1.0], k)
    exact = expected_output(x, shards, None)

    def loss(out: Tensor) -> float:
        return float((out.double() - exact).norm() / exact.norm())

    rounded = loss(expected_output(x.bfloat16(), shards, None))
    losses = {}
    for terms in (None, 1, 2, 3):
        option(vllm_config, terms)
        config = Nvfp4TcConfig(checkpoint(weight_only=True))
        with set_default_torch_dtype(torch.float16):
            layer = RowParallelLinear(k, 128, bias=False, quant_config=config, prefix="m.o_proj")
        losses[terms] = loss(loaded(layer, shards, [None], SCALE)(x)[0])
    print(f"bfloat16 loses {rounded:.2e}, terms {losses}")
    assert losses[3] < 0.6 * rounded
    assert losses[1] > 10 * rounded
    assert rounded < losses[2] < 10 * rounded
    assert losses[None] < losses[3]


@pytest.mark.processes
def test_compiled_is_the_same(vllm_config: Any) -> None:
    option(vllm_config, {"gate_up_proj": 3, "m.down_proj": 2})
    mlp = Mlp(Nvfp4TcConfig(checkpoint(weight_only=True)), SiluAndMul)
    loaded(mlp.gate_up_proj, quantised_shards([176] * 2, [1.0, 8.0]), [0, 1], SCALE)
    build, rows, ids = LAYERS["row"]
    row = loaded(build(Nvfp4TcConfig(checkpoint())), quantised_shards(rows, [1.0]), ids, SCALE)

    def both(x: Tensor) -> Tensor:
        return torch.cat([mlp(x), row(x)[0]], dim=-1)

    compiled: Callable[[Tensor], Tensor] = torch.compile(both, fullgraph=True, dynamic=True)
    x = torch.randn(40, K).bfloat16()
    for tokens in (5, 1, 40):  # up to 32 tokens, the terms' scales share an atom
        assert torch.equal(compiled(x[:tokens]), both(x[:tokens]))


def test_mla_gets_its_weight(vllm_config: Any) -> None:
    """MLA multiplies an identity by kv_b_proj; rows with one non-zero value are exact in terms."""
    option(vllm_config, None)
    with standing_in("cpu", "sm_100"):
        method = LAYERS["column"][0](Nvfp4TcConfig(checkpoint(weight_only=True))).quant_method
        assert method.plan.arithmetic == "W4A4×3 per-token"
    eye = torch.eye(K, dtype=torch.bfloat16)
    assert torch.equal(sums(eye, row_global_scales(eye), 3).float(), eye.float())
