"""Engine on CPU as on sm_90: linear layers multiply 16 bits or, on request, FP8."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.custom_op import op_registry_oot

from nvfp4_kernels import add_rms_norm
from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.rotary import reference
from tests.engine import report_command, run
from tests.sm90_product import sm90_ops
from vllm_fp4_plugin.fusion import norm_kernel, norm_module
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

pytestmark = pytest.mark.slow

WHY = "sm_90 has no W4A4 kernel, activations stay 16-bit"
REQUESTED = "activation is fp8"
APART = "quantises its input itself: attention writes no FP8"


def rotate(
    positions: Tensor, q: Tensor, k: Tensor, head_dim: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """Rotate ``q`` and ``k`` by the plugin's formula, in place of vLLM's rotary kernel.

    On CPUs with BF16 instructions both agree; elsewhere vLLM truncates mantissas.
    """
    assert is_neox
    heads = [x.view(len(x), -1, head_dim) for x in (q, k)]
    for x, rotated in zip(
        heads, reference.rotary_embedding(positions, *heads, cos_sin_cache), strict=True
    ):
        x.copy_(rotated)


def test_a_w4a4_checkpoint_is_served_in_fp8(
    modelopt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities are bit-identical to those with FP8 activations on a CPU."""
    from vllm import _custom_ops

    monkeypatch.setattr(_custom_ops, "rotary_embedding", rotate)
    settings = {"kv_cache_dtype": "bfloat16", "attention_backend": "CPU_ATTN", "new_tokens": 4}
    fp8 = {"nvfp4_tc": {"activation": "fp8"}}
    reference = run(str(modelopt), additional_config=fp8, **settings)
    with sm90_ops() as product:
        served = run(str(modelopt), additional_config=fp8, **settings)
    assert served.logprobs == reference.logprobs
    assert served.generated == reference.generated
    [attention] = [line for line in served.report if line.startswith("attn ")]
    norm = "nvfp4_add_rms_norm_quantize_w4a8/RmsNormQuantizeFp8Sm90 (sm_90), A8 static"
    assert served.report[:-1] == [
        "fused_add_rms_norm ×1: nvfp4_add_rms_norm/AddRmsNormSm90 (sm_90), 16-bit",
        f"qkv_proj ×2: nvfp4_gemm_w4a8/fp8_wgmma (sm_90), W4A8 static, {REQUESTED}",
        f"o_proj ×2: nvfp4_gemm_w4a8/fp8_wgmma (sm_90), W4A8 static, {REQUESTED}; {APART}",
        "rotary_emb ×1: nvfp4_rotary_embedding/RotaryEmbeddingSm90 (sm_90), 16-bit",
        attention,
        f"gate_up_proj ×2: nvfp4_silu_mul_gemm_w4a8/fp8_wgmma (sm_90), W4A8 static, {REQUESTED}; "
        "result quantised for down_proj",
        f"down_proj ×2: nvfp4_gemm_w4a8/fp8_wgmma (sm_90), W4A8 static, {REQUESTED}",
        f"input_layernorm ×2: {norm}, quantises for qkv_proj",
        f"post_attention_layernorm ×2: {norm}, quantises for gate_up_proj",
    ]
    e4m3, bfloat16 = torch.float8_e4m3fn, torch.bfloat16
    assert set(product.formats) == {(e4m3, e4m3), (e4m3, bfloat16)}


def test_a_w4a4_checkpoint_is_served_weight_only(
    modelopt: Path, bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weight-only serving in the blocked layout gives bit-identical log-probabilities."""
    from vllm import _custom_ops

    weight_only = tmp_path / "weight-only"
    quantize_checkpoint(bf16, weight_only)
    monkeypatch.setattr(_custom_ops, "rotary_embedding", rotate)
    blocked = run(str(weight_only), attention_backend="CPU_ATTN", new_tokens=4)
    with sm90_ops() as product:
        fragments = run(str(modelopt), kv_cache_dtype="bfloat16", new_tokens=4)
    assert fragments.logprobs == blocked.logprobs
    assert fragments.generated == blocked.generated
    attention, memory = fragments.report[4], fragments.report[-1]
    assert fragments.report == [
        "fused_add_rms_norm ×1: nvfp4_add_rms_norm/AddRmsNormSm90 (sm_90), 16-bit",
        f"qkv_proj ×2: nvfp4_gemm_w4a16/wgmma (sm_90), W4A16, {WHY}",
        f"o_proj ×2: nvfp4_gemm_w4a16/wgmma (sm_90), W4A16, {WHY}",
        "rotary_emb ×1: nvfp4_rotary_embedding/RotaryEmbeddingSm90 (sm_90), 16-bit",
        attention,
        f"gate_up_proj ×2: nvfp4_silu_mul_gemm_w4a16/wgmma (sm_90), W4A16, {WHY}",
        f"down_proj ×2: nvfp4_gemm_w4a16/wgmma (sm_90), W4A16, {WHY}",
        memory,
    ]
    assert attention.startswith(
        "attn ×2: CPU_ATTN (vLLM), bfloat16 KV cache, not CUSTOM: head size is 32, must be one of "
        "64, 96, 128, 192, 256; there is no FlashAttention 3 (vLLM) here"
    )
    assert min(product.rows) == 1  # decoding
    assert max(product.rows) > 32  # the prompt


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "compiled"])
def test_norms_without_vllms_ir(
    modelopt: Path, monkeypatch: pytest.MonkeyPatch, enforce_eager: bool
) -> None:
    """Modules replace vLLM's norms, whose IR is removed after 0.33; the tokens are the same."""
    norms = "fused_add_rms_norm ×1: nvfp4_add_rms_norm/AddRmsNormSm90 (sm_90), 16-bit"
    ran: list[int] = []

    def ours(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        ran.append(len(x))
        return add_rms_norm(x, *rest)

    with sm90_ops():
        by_ir = run(str(modelopt), kv_cache_dtype="bfloat16", enforce_eager=enforce_eager)
        monkeypatch.setattr(norm_kernel, "has_ir", lambda: False)
        monkeypatch.setattr(norm_module, "add_rms_norm", ours)
        monkeypatch.delitem(op_registry_oot, "RMSNorm", raising=False)
        by_module = run(str(modelopt), kv_cache_dtype="bfloat16", enforce_eager=enforce_eager)
        op_registry_oot.pop("RMSNorm")
    assert by_ir.report == by_module.report
    assert norms in by_module.report
    assert by_ir.logprobs == by_module.logprobs
    assert by_ir.generated == by_module.generated
    assert ran


def test_report_command(modelopt: Path) -> None:
    """The report plans sm_90 before anything is loaded; attention is vLLM's."""
    with standing_in("cpu", "sm_90"):
        done = report_command(modelopt)
    assert done.exit_code == 0, done.stderr
    text = " ".join(done.stdout.replace("│", " ").split())
    assert text.count(f"nvfp4_gemm_w4a16/wgmma (sm_90) W4A16 {WHY}") == 3
    assert text.count(f"nvfp4_silu_mul_gemm_w4a16/wgmma (sm_90) W4A16 {WHY}") == 1
    assert "attn 2 CPU_ATTN (vLLM)" in text
    assert "W4A4 static" not in text
