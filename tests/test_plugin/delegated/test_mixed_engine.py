"""Mixed-precision checkpoints in real engines, against transformers on their decoded weights.

Bounds on the mean absolute difference of log-probabilities are about twice the values seen for FP8
(.011 to .017), and three times those for W4A4 (.026). The float32 reference rounds the inputs of
FP8 layers as the engine does, but its earlier layers are exact, and it rounds no NVFP4 activations.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.engine import distance, run, with_values
from tests.mixed_checkpoints import Mixed, set_config, write
from vllm_fp4_plugin.formats.kind import Kind

pytestmark = pytest.mark.slow

SAME = 0.03  # W4A16 and FP8
SAME_W4A4 = 0.08

W4A16 = "nvfp4_gemm_w4a16/reference (cpu), W4A16"
QKV, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
Write = Callable[..., Mixed]


@pytest.fixture
def mixed(bf16: Path, modelopt: Path, tmp_path: Path) -> Write:
    def written(kinds: Mapping[str, Kind], *, format: str) -> Mixed:
        return write(tmp_path / "mixed", bf16, modelopt, kinds, modelopt=format == "modelopt")

    return written


def served(mixed: Mixed) -> Any:
    return run(str(mixed.path), kv_cache_dtype="auto")


def test_modelopt_mlp_w4a16_attention_fp8(mixed: Write) -> None:
    """The model resembles Qwen3.6-27B: FP8 attention with a calibrated scale for each shard."""
    kinds = dict.fromkeys(MLP, Kind.NVFP4_A16) | dict.fromkeys((*QKV, "o_proj"), Kind.FP8)
    model = mixed(kinds, format="modelopt")
    found = served(model)
    assert distance(found, with_values(model.path, model.values, model.inputs)) < SAME
    for layer in ("qkv_proj", "o_proj"):
        assert f"{layer} ×2: fp8_linear/reference (cpu), W8A8 static" in found.report
    assert f"down_proj ×2: {W4A16}" in found.report
    assert "gate_up_proj ×2: nvfp4_silu_mul_gemm_w4a16/reference (cpu), W4A16" in found.report


def test_modelopt_w4a4_and_w4a16_side_by_side(mixed: Write) -> None:
    """Layers are W4A4, W4A16, FP8 blocks, and FP8 per channel by vLLM's method, like the head."""
    kinds = dict.fromkeys(("gate_proj", "up_proj"), Kind.NVFP4_A16) | {
        "down_proj": Kind.NVFP4,
        "o_proj": Kind.FP8_BLOCK,
        "lm_head": Kind.FP8_CHANNEL,
    }
    model = mixed(kinds | dict.fromkeys(QKV, Kind.FP8_CHANNEL), format="modelopt")
    found = served(model)
    assert distance(found, with_values(model.path, model.values, model.inputs)) < SAME_W4A4
    for layer in ("qkv_proj ×2", "lm_head ×1"):
        assert f"{layer}: fp8 (vLLM: ModelOptLinearMethod), W8A8 dynamic" in found.report
    assert "o_proj ×2: fp8_linear/reference (cpu), W8A8 dynamic" in found.report
    assert "down_proj ×2: nvfp4_gemm/reference (cpu), W4A4 static" in found.report


def test_compressed_tensors_of_several_groups(mixed: Write) -> None:
    kinds = dict.fromkeys(("gate_proj", "up_proj"), Kind.NVFP4_A16) | {
        "down_proj": Kind.MXFP8,
        "o_proj": Kind.FP8,
        "lm_head": Kind.MXFP8,
    }
    model = mixed(kinds | dict.fromkeys(QKV, Kind.FP8_CHANNEL), format="compressed-tensors")
    found = served(model)
    assert distance(found, with_values(model.path, model.values, model.inputs)) < SAME
    assert "qkv_proj ×2: fp8 (vLLM: CompressedTensorsW8A8Fp8), W8A8 dynamic" in found.report
    assert "o_proj ×2: fp8_linear/reference (cpu), W8A8 static" in found.report
    for layer in ("down_proj ×2", "lm_head ×1"):
        assert f"{layer}: mxfp8_linear/reference (cpu), W8A8 dynamic" in found.report


def test_compiled_without_a_list_of_layers(mixed: Write) -> None:
    """The config says only MIXED_PRECISION: every layer's kind follows from its tensors."""
    kinds = dict.fromkeys(MLP, Kind.NVFP4_A16) | dict.fromkeys(QKV, Kind.FP8)
    model = mixed(kinds | {"o_proj": Kind.MXFP8}, format="modelopt")
    set_config(model.path, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"})
    found = run(str(model.path), enforce_eager=False)
    assert distance(found, with_values(model.path, model.values, model.inputs)) < SAME
    assert "o_proj ×2: mxfp8_linear/reference (cpu), W8A8 dynamic" in found.report


# --- refused before any weight is read --------------------------------------------------------

FP8_ATTENTION = dict.fromkeys(MLP, Kind.NVFP4_A16) | dict.fromkeys((*QKV, "o_proj"), Kind.FP8)
O_PROJ = "model.layers.1.self_attn.o_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{O_PROJ}.input_scale"), r"o_proj\.input_scale: is missing beside"),
        (
            lambda t: t.pop(f"{O_PROJ}.weight_scale"),
            r"o_proj: holds .* weight F8_E4M3 \[128, 128\]",
        ),
        (
            lambda t: t.update({f"{O_PROJ}.weight_scale": t[f"{O_PROJ}.weight_scale"].expand(128)}),
            r"o_proj\.weight_scale: its shape in .* is \(128,\), which is FP8 per-channel, must be",
        ),
    ],
    ids=["no input scale", "no weight scale", "another granularity"],
)
def test_contradictions_stop_the_engine(
    change: Callable[[dict[str, Any]], Any], message: str, mixed: Write
) -> None:
    file = mixed(FP8_ATTENTION, format="modelopt").path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        run(str(file.parent))


def test_a_fused_layer_of_two_kinds_stops_the_engine(mixed: Write) -> None:
    model = mixed(FP8_ATTENTION | {"k_proj": Kind.FP8_CHANNEL}, format="modelopt")
    with pytest.raises(
        ValueError, match="qkv_proj: q_proj is FP8 per-tensor, k_proj is FP8 per-ch"
    ):
        run(str(model.path))
