"""Experts that a config describes; ``build`` compiles the kernels of a server's warm-up."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from nvfp4_kernels.activation import SILU, Activation
from nvfp4_kernels.gemm.grouped.tile_tokens import ExpertSizes
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.precompile.experts_layer import Choice, Experts
from nvfp4_kernels.precompile.model import Layer
from nvfp4_kernels.tool import wanted
from nvfp4_kernels.tool.config_file import LEGACY_FILE, UnusableModel, load_config
from nvfp4_kernels.tool.mixture import Mixture, read_mixture
from nvfp4_kernels.tool.options import ActivationName
from nvfp4_kernels.tool.quantized_inputs import EITHER, Inputs, quantized_inputs
from vllm_fp4_plugin.warmup import ExpertsLayer, Product, product_kernels

QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 144,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "torch_dtype": "bfloat16",
}
CHOICE = Choice(Router(2, renormalize=False), "bfloat16", False)
STATIC, WEIGHT_ONLY = Inputs("static"), Inputs("per-token", 3)


def write(folder: Path, **changed: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**QWEN, **changed}))
    return folder


def read(folder: Path, *, tensor_parallel: int = 1, expert_parallel: int = 1) -> Mixture:
    return read_mixture(
        load_config(folder), tensor_parallel=tensor_parallel, expert_parallel=expert_parallel,
        dtype=None, fuse_mlp=True,
    )  # fmt: skip


def sizes(mixture: Mixture) -> list[ExpertSizes]:
    return [experts.sizes for experts in mixture.experts]


def test_experts(tmp_path: Path) -> None:
    found = read(write(tmp_path))
    assert found.experts == (
        Experts(ExpertSizes(256, 144, 8, 8), 2, SILU, "bfloat16", "16-bit", choice=CHOICE),
    )
    assert [layer.name for layer in found.dense.layers] == ["qkv_proj", "o_proj"]
    assert found.dense.attention is not None
    assert found.left_out == ""


def test_gpus_share_experts(tmp_path: Path) -> None:
    write(tmp_path, moe_intermediate_size=128)
    assert sizes(read(tmp_path, tensor_parallel=2)) == [ExpertSizes(256, 64, 8, 8)]
    whole = read(tmp_path, tensor_parallel=2, expert_parallel=2)
    assert sizes(whole) == [ExpertSizes(256, 128, 4, 8)]
    assert whole.experts[0].mapped == 8
    assert Layer("o_proj", 256, 128) in whole.dense.layers
    uneven = read(tmp_path, expert_parallel=3)
    assert sizes(uneven) == [ExpertSizes(256, 128, 2, 8), ExpertSizes(256, 128, 3, 8)]


_READ = (  # noqa: SIM905
    "decoder_sparse_step first_k_dense_replace head_dim hidden_act hidden_activation hidden_size "
    "interleave_moe_layer_step layer_types mlp_hidden_act mlp_only_layers moe_intermediate_size "
    "n_group n_shared_experts num_experts_per_tok num_key_value_heads num_shared_experts "
    "partial_rotary_factor rope_parameters rope_scaling scoring_func sliding_window "
    "shared_expert_intermediate_size swiglu_limit swiglu_limits topk_group torch_dtype"
).split()


@pytest.mark.parametrize("kind", ["qwen3_moe", "llama4_text", "gemma4_text", "deepseek_v3"])
def test_any_value_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    for key in _READ:
        for value in ("x", -1, 1.5, True, ["x"], {"a": 1}, {"factor": "x"}, [1.5, "x"]):
            path = write(tmp_path, model_type=kind, num_local_experts=8, **{key: value})
            with contextlib.suppress(UnusableModel):
                read(path)


@pytest.mark.parametrize(
    ("changed", "experts", "layers", "left_out"),
    [
        (
            {"model_type": "mixtral", "moe_intermediate_size": None, "num_experts": None,
             "num_local_experts": 4},
            (256, 512, 4, SILU, True, False), ["qkv_proj", "o_proj"], "",
        ),
        (
            {"model_type": "deepseek_v3", "num_experts": None, "n_routed_experts": 8,
             "n_shared_experts": 2, "first_k_dense_replace": 1},
            (256, 144, 8, SILU, True, False),
            ["gate_up_proj", "down_proj", "shared experts' gate_up_proj",
             "shared experts' down_proj"],
            "attention of deepseek_v3 and its projections",
        ),
        (
            {"model_type": "llama4_text", "num_experts": None, "num_local_experts": 16,
             "moe_intermediate_size": None},
            (256, 512, 16, SILU, True, True),
            ["shared experts' gate_up_proj", "shared experts' down_proj"],
            "attention of llama4_text and its projections",
        ),
        (
            {"model_type": "nemotron_h", "mlp_hidden_act": "relu2", "moe_latent_size": 128},
            (128, 144, 8, Activation("relu2"), False, False), [],
            "attention of nemotron_h and its projections",
        ),
        (
            {"model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh"},
            (256, 144, 8, Activation("gelu_tanh"), True, False), ["gate_up_proj", "down_proj"],
            "attention of gemma4_text and its projections",
        ),
    ],
    ids=["mixtral", "deepseek", "llama 4", "nemotron", "gemma 4"],
)  # fmt: skip
def test_families(
    tmp_path: Path,
    changed: dict[str, Any],
    experts: tuple[int, int, int, Activation, bool, bool],
    layers: list[str],
    left_out: str,
) -> None:
    found = read(write(tmp_path, **changed))
    (one,) = found.experts
    h, i, held, activation, gated, on_input = experts
    assert one.sizes == ExpertSizes(h, i, held, held, gated)
    assert (one.activation, one.weight_on_input) == (activation, on_input)
    assert [layer.name for layer in found.dense.layers] == layers
    assert found.left_out == left_out


@pytest.mark.parametrize(
    ("changed", "activations"),
    [
        ({"swiglu_limit": 10}, [Activation("silu", 10.0)]),
        (
            {"hidden_act": "situ", "activation_situ_beta": 4, "activation_situ_linear_beta": 25},
            [Activation("situ", 25.0, 4.0)],
        ),
        (
            {"model_type": "minimax_m3", "hidden_act": "swigluoai", "swiglu_limit": 7,
             "swiglu_alpha": 1.702, "swiglu_beta": 1},
            [Activation("swigluoai_uninterleave", 7.0, 1.702, 1.0)],
        ),
        (
            {"model_type": "gpt_oss", "swiglu_limit": 7},
            [Activation("swigluoai_uninterleave", 7.0, 1.702, 1.0)],
        ),
        ({"swiglu_limits": [0, None, 7]}, [SILU, Activation("swiglustep", 7.0)]),
    ],
    ids=["clamped", "situ", "swigluoai", "gpt-oss", "step"],
)  # fmt: skip
def test_activations(
    tmp_path: Path, changed: dict[str, Any], activations: list[Activation]
) -> None:
    found = read(write(tmp_path, **changed))
    assert [experts.activation for experts in found.experts] == activations
    assert {experts.bias for experts in found.experts} == {changed.get("model_type") == "gpt_oss"}


@pytest.mark.parametrize(
    ("changed", "gpus", "message"),
    [
        ({"hidden_act": "tanh"}, (1, 1), "hidden_act is 'tanh', must be one of silu, .* for exp"),
        ({"swiglu_limits": [3]}, (1, 1), r"swiglu_limits is \[3\], must be a list of 0 and 7"),
        ({"swiglu_limit": "x"}, (1, 1), "swiglu_limit is 'x', must be a number"),
        ({"num_experts_per_tok": None}, (1, 1), "num_experts_per_tok is None, must be a positive"),
        ({"moe_intermediate_size": 72}, (1, 1), "I of its experts is 72, must be a multiple of 16"),
        ({}, (1, 9), "--expert-parallel is 9, must be at most its 8 experts"),
        ({}, (5, 1), "--tensor-parallel is 5, must divide"),
    ],
    ids=["activation", "limits", "limit", "top k", "width", "many GPUs", "odd GPUs"],
)
def test_experts_that_are_refused(
    tmp_path: Path, changed: dict[str, Any], gpus: tuple[int, int], message: str
) -> None:
    write(tmp_path, **changed)
    with pytest.raises(UnusableModel, match=message):
        read(tmp_path, tensor_parallel=gpus[0], expert_parallel=gpus[1])


FP4 = {"num_bits": 4, "group_size": 16}
MXFP4 = {"num_bits": 4, "group_size": 32}
FP8 = {"num_bits": 8}


@pytest.mark.parametrize(
    ("quantization", "inputs"),
    [
        ({}, EITHER),
        ({"quant_algo": "NVFP4"}, (STATIC,)),
        ({"quantization": {"quant_algo": "W4A16_NVFP4"}}, (WEIGHT_ONLY,)),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    "a": {"quant_algo": "FP8"},
                    "b": {"quant_algo": "W4A16_NVFP4"},
                    "c": {"quant_algo": "NVFP4"},
                },
            },
            (STATIC, WEIGHT_ONLY),
        ),
        ({"config_groups": {"0": {"weights": FP4, "input_activations": FP4}}}, (STATIC,)),
        ({"config_groups": {"0": {"weights": FP4, "input_activations": None}}}, (WEIGHT_ONLY,)),
        (
            {"config_groups": {"0": {"weights": FP8}, "1": {"weights": FP4}}},
            (WEIGHT_ONLY,),
        ),
        ({"config_groups": {"0": {"weights": MXFP4}}}, EITHER),
    ],
    ids=["16 bits", "modelopt", "legacy, weights", "mixed", "groups", "groups, weights",
         "groups, mixed", "other formats"],
)  # fmt: skip
def test_inputs_of_checkpoints(quantization: dict[str, Any], inputs: tuple[Inputs, ...]) -> None:
    assert quantized_inputs(quantization) == inputs


def test_a_file_beside_the_config_is_read(tmp_path: Path) -> None:
    legacy = {"quantization": {"quant_algo": "W4A16_NVFP4"}}
    (write(tmp_path) / LEGACY_FILE).write_text(json.dumps(legacy))
    assert quantized_inputs(load_config(tmp_path).quantization) == (WEIGHT_ONLY,)


@pytest.mark.parametrize(
    ("algorithm", "family", "option", "inputs"),
    [
        ("NVFP4", "sm_100", None, STATIC),
        ("W4A16_NVFP4", "sm_100", None, WEIGHT_ONLY),
        ("W4A16_NVFP4", "sm_90", None, None),
        ("NVFP4", "sm_90", None, None),
        ("NVFP4", "sm_90", "16-bit", None),
        ("NVFP4", "sm_90", "fp8", STATIC),
        ("W4A16_NVFP4", "sm_90", "fp8", Inputs("per-token")),
    ],
)
def test_what_is_built_is_what_a_server_warms_up(
    tmp_path: Path, algorithm: str, family: str, option: str | None, inputs: Inputs | None
) -> None:
    write(tmp_path, quantization_config={"quant_algo": algorithm})
    mixture = read(tmp_path)
    asked = wanted.Wanted(
        mixture, 40, 132, 16, quantized_inputs(load_config(tmp_path).quantization),
        None if option is None else ActivationName(option), None, None,
    )  # fmt: skip
    built = set(wanted.KERNELS[family](asked))
    # I is padded on Blackwell, as tensor maps need strides of a multiple of 16 bytes.
    width = 160 if family == "sm_100" else 144
    activation, terms = inputs or ("16-bit", 1)
    is_fp8 = option == "fp8"
    of_experts: Any = f"fp8-{activation}" if is_fp8 else activation
    layer = ExpertsLayer(
        family,
        Experts(
            ExpertSizes(256, width, 8, 8), 2, SILU, "bfloat16", of_experts, terms, choice=CHOICE
        ),
    )
    linear = [
        Product(family, each, "bfloat16", activation, terms, fp8=is_fp8)
        for each in mixture.dense.layers
    ]
    warmed_up = set(product_kernels([layer, *linear], 40, 132))
    assert warmed_up <= built
    of_layers = ("gemm", "quantize", "grouped_gemm", "moe_dispatch")
    assert {spec.op for spec in built - warmed_up}.isdisjoint(of_layers)


def test_options_come_before_the_model(tmp_path: Path) -> None:
    def inputs(activation: ActivationName | None, terms: int | None) -> list[Inputs]:
        asked = wanted.Wanted(
            read(write(tmp_path)), 1, 132, 16, (WEIGHT_ONLY,), activation, terms, None
        )
        return wanted.inputs_of(asked)

    assert inputs(None, None) == [WEIGHT_ONLY]
    assert inputs(None, 2) == [Inputs("per-token", 2)]
    assert inputs(ActivationName.both, 1) == [STATIC, Inputs("per-token")]


@pytest.mark.parametrize(
    ("changed", "choice"),
    [
        ({"norm_topk_prob": True}, Choice(Router(2), "bfloat16", False)),
        ({"model_type": "mixtral"}, Choice(Router(2), "bfloat16", False)),
        (
            {"model_type": "glm4_moe", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0},
            Choice(Router(2, "sigmoid", groups=4, top_groups=2), "float32", True),
        ),
        ({"model_type": "llama4_text"}, None),
    ],
)
def test_routers(changed: dict[str, Any], choice: Choice | None, tmp_path: Path) -> None:
    assert [each.choice for each in read(write(tmp_path, **changed)).experts] == [choice]
