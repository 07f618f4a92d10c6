"""The report of every layer's kernel."""

from vllm_fp4_plugin.report import LayerRecord, Report

GEMM = "nvfp4_gemm/reference (cpu)"


def record(name: str, kernel: str = GEMM, reason: str = "", size: int = 9) -> LayerRecord:
    return LayerRecord(name, kernel, "W4A4 static", reason, 16, size)


def test_layers_that_differ_in_nothing_share_a_line() -> None:
    report = Report()
    for layer in range(3):
        report.add(record(f"model.layers.{layer}.self_attn.qkv_proj"))
        reason = "not fused: LoRA is enabled" if layer == 2 else ""
        report.add(record(f"model.layers.{layer}.mlp.gate_up_proj", reason=reason))
    report.add(
        record("lm_head", kernel="unquantized (vLLM)", reason="ignored by 'lm_head'", size=32)
    )
    assert report.lines() == [
        f"qkv_proj ×3: {GEMM}, W4A4 static",
        f"gate_up_proj ×2: {GEMM}, W4A4 static",
        f"gate_up_proj ×1: {GEMM}, W4A4 static, not fused: LoRA is enabled",
        "lm_head ×1: unquantized (vLLM), W4A4 static, ignored by 'lm_head'",
        "weights: 0.5625 bytes per weight (54 bytes) in layers on our NVFP4 kernels, "
        "0.7679 bytes per weight (86 bytes) in all layers above, on this rank; norms, "
        "16-bit embeddings and heads come on top",
    ]


def test_memory_counts_experts_and_quantised_embeddings() -> None:
    report = Report()
    report.add(record("model.embed_tokens", kernel="lookup (torch)"))
    report.add(record("model.layers.0.mlp.experts", kernel="nvfp4_grouped_gemm/reference (cpu)"))
    assert report.memory().startswith(
        "weights: 0.5625 bytes per weight (9 bytes) in layers on our NVFP4 kernels, "
    )
    assert "; norms, 16-bit embeddings" in report.memory()
    assert "0.5625 bytes per weight (18 bytes) in all layers above, " in report.memory()


def test_a_layer_built_anew_is_counted_once() -> None:
    report = Report()
    report.add(record("model.layers.0.mlp.down_proj"))
    report.add(record("model.layers.0.mlp.down_proj", reason="other"))
    assert [layer.reason for layer in report.layers] == ["other"]


def test_nothing_to_report() -> None:
    assert Report().lines() == []
