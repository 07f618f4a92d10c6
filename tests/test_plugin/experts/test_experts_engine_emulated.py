"""Engine on CPU with the kernels of a GPU: experts run their compiled PTX, emulated."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from vllm.model_executor.models.qwen3_moe import Qwen3MoeDecoderLayer

from tests import devices, emulated_layers, moe_checkpoints, moe_reference, trained_mixtures
from tests.emulator import randomised
from tests.engine import NEW_TOKENS, distance, run
from tests.recorded_warmup import Kernels, recorded
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

pytestmark = pytest.mark.slow

# Mean distance between kernels and references, which sum in different orders: three times the value
# seen. Exchanged scales of two experts make it .05.
SAME = 0.01
SAME_16_BIT = 0.03  # from transformers, of weights alone in 4 bits
CONFIG = moe_checkpoints.qwen3(num_hidden_layers=1)
GROUPED = "nvfp4_grouped_silu_mul_gemm"

LAYERS = 2  # of the trained model
# Launches of a layer: before attention, for attention, and after it.
BEFORE = ("RmsNormQuantizeSm100", "BlockScaledGemm")
DECODE_ATTENTION = ("FmhaSm100, rotates, quantises",)
PREFILL_ATTENTION = ("RotaryStore", "FmhaSm100, quantises")
AFTER = (
    "BlockScaledGemm",
    "vLLM's norm",
    "vLLM's linear layer",  # the router
    "MoeDispatch, from logits, quantises",
    "BlockScaledGemm, grouped, gate and up, quantises",
    "BlockScaledGemm, grouped",
    "MoeCombine",
)


def check_compiled(kernels: Kernels, *names: str) -> None:
    """Check that kernels of these names ran and were compiled while the server started."""
    made, parts = kernels.warmup["linear layers'"], ("Gemm", "Moe")
    launched = {k for k in kernels.launched if any(p in type(k).__name__ for p in parts)}
    assert launched <= made
    assert set(names) < {named(kernel) for kernel in launched}


def named(kernel: Any) -> str:
    """Class of a kernel; of a dispatch, also the classes of its source and rows."""
    kind = type(kernel).__name__
    parts = (kernel.source, kernel.rows) if kind == "MoeDispatch" else ()
    return ", ".join((kind, *(type(part).__name__ for part in parts)))


def tell_experts_apart(tensors: dict[str, Tensor]) -> None:
    """Scale experts by different powers of two: up is multiplied, and down is divided."""
    for name, tensor in tensors.items():
        _, _, expert = name.partition(".experts.")
        number, _, projection = expert.partition(".")
        sign = {"up_proj.weight": 1, "down_proj.weight": -1}.get(projection, 0)
        if sign:
            tensor.mul_(4.0 ** (sign * int(number)))


@pytest.mark.arch("sm_100")
def test_a_whole_layer(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """A layer takes 10 launches (11 in a prefill): two by vLLM, all other launches emulated.

    A prefill of many tokens is followed by single-token decodes, from a norm to the experts' sum;
    the last step repeats the launches of its predecessor.
    """
    devices.cutlass_or_skip()
    trained = trained_mixtures.trained("Qwen3", pytestconfig.rootpath / ".cache" / "tests")
    plain = Path(shutil.copytree(trained, tmp_path / "plain"))
    moe_checkpoints.change(plain, tell_experts_apart)
    text, model = tmp_path / "text.txt", str(tmp_path / "model")
    text.write_text(trained_mixtures.learnt())
    quantize_checkpoint(plain, Path(model), calibrate=text, seq_len=64)
    reference = run(model)
    with (
        devices.emulated_ops(randomised(1)),
        recorded() as kernels,
        emulated_layers.watched(Qwen3MoeDecoderLayer) as calls,
    ):
        emulated = run(model)
    assert [line for line in emulated.report if "A4" in line or "attn" in line] == [
        "qkv_proj ×2: nvfp4_gemm/block_scaled (sm_100), W4A4 static",
        "o_proj ×2: nvfp4_gemm/block_scaled (sm_100), W4A4 static",
        "attn ×2: nvfp4_paged_attention/FmhaSm100 (sm_100), bfloat16 KV cache, by default; "
        "queries and keys normalised, rotated; result quantised for o_proj",
        f"experts ×2: {GROUPED}/block_scaled (sm_100), W4A4 static",
        "input_layernorm ×2: nvfp4_add_rms_norm_quantize/RmsNormQuantizeSm100 (sm_100), "
        "A4 static, quantises for qkv_proj",
    ]
    prefills, decodes = calls[:LAYERS], calls[LAYERS:]
    for call in prefills:
        assert call.tokens == len(reference.logprobs) + 1
        assert call.launches == [*BEFORE, *PREFILL_ATTENTION, *AFTER]
    assert len(decodes) == LAYERS * (NEW_TOKENS - 1)
    for call in decodes:
        assert call.tokens == 1
        assert call.launches == [*BEFORE, *DECODE_ATTENTION, *AFTER]
    ours = [name for name in decodes[-1].launches if "vLLM" not in name]
    assert decodes[-1].repeated == ours
    assert "RotaryStore" in prefills[-1].repeated
    check_compiled(kernels, "MoeDispatch, TopkRoute, MoeRows", "MoeCombine")
    assert emulated.generated == reference.generated
    apart = distance(emulated, reference)
    print(f"log-probabilities differ by {apart} in the mean")
    assert apart < SAME


@pytest.mark.arch("sm_100")
def test_blackwell_in_terms(tmp_path: Path) -> None:
    """Activations that a checkpoint leaves in 16 bits become sums of three terms."""
    devices.cutlass_or_skip()
    model = moe_checkpoints.write(tmp_path, CONFIG, {"experts": Kind.NVFP4_A16})
    with devices.emulated_ops(randomised(1)), recorded() as kernels:
        emulated = run(str(model.path), attention_backend="CPU_ATTN")
    tokens = "MoeDispatch, TopkRoute, MoeRows", "MoeDispatch, GivenTiles, MoeRows"
    check_compiled(kernels, *tokens, "MoeCombine")
    why = "sm_100 has no W4A16 kernel; 3 terms lose less than bfloat16"
    row = f"experts ×1: {GROUPED}/block_scaled (sm_100), W4A4×3 per-token, {why}"
    assert row in emulated.report
    assert distance(emulated, moe_reference.said(model)) < SAME_16_BIT


@pytest.mark.arch("sm_90")
def test_hopper(tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    model = moe_checkpoints.write(tmp_path, CONFIG, {"experts": Kind.NVFP4_A16})
    with devices.emulated_ops(randomised(1), "sm_90"), recorded() as kernels:
        emulated = run(str(model.path), attention_backend="CPU_ATTN")
    check_compiled(kernels, "MoeDispatch, TopkRoute, GatheredRows", "MoeCombine")
    assert f"experts ×1: {GROUPED}_w4a16/wgmma (sm_90), W4A16" in emulated.report
    assert distance(emulated, moe_reference.said(model)) < SAME_16_BIT


@pytest.mark.arch("sm_90")
@pytest.mark.parametrize("kind", [Kind.NVFP4, Kind.NVFP4_A16], ids=["static", "per token"])
def test_hopper_in_fp8(kind: Kind, tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    model = moe_checkpoints.write(tmp_path, CONFIG, {"experts": kind})
    option: dict[str, Any] = {"additional_config": {"nvfp4_tc": {"activation": "fp8"}}}
    reference = run(str(model.path), attention_backend="CPU_ATTN", **option)
    with devices.emulated_ops(randomised(1), "sm_90"), recorded() as kernels:
        emulated = run(str(model.path), attention_backend="CPU_ATTN", **option)
    is_static = kind is Kind.NVFP4
    between = () if is_static else ("MoeDispatch, GivenTiles, Fp8TokenRows",)
    check_compiled(kernels, "MoeDispatch, TopkRoute, Fp8TokenRows", *between, "MoeCombine")
    scaling = "static" if is_static else "per-token"
    row = f"experts ×1: {GROUPED}_w4a8/fp8_wgmma (sm_90), W4A8 {scaling}, activation is fp8"
    assert row in emulated.report
    away = distance(emulated, reference)
    print(f"log-probabilities differ by {away} in the mean")
    assert away < SAME
