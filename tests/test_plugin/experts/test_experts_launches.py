"""Launches of a decoder layer with experts, counted in an engine on CPU, as ``launches`` lists."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from nvfp4_kernels.gemm.sm100.choose_grouped import choose_tile_tokens
from nvfp4_kernels.moe.dispatch.choose import choose_rows, fuse_logits
from nvfp4_kernels.sm100.limits import SMS
from tests import launch_counts, moe_checkpoints
from tests.engine import run
from tests.modelled.launches import TODAY, Kind, launches
from vllm_fp4_plugin.attention import impl, rotation
from vllm_fp4_plugin.experts import op
from vllm_fp4_plugin.fusion.self_check import run as self_check
from vllm_fp4_plugin.ops import linear as linear_op
from vllm_fp4_plugin.ops import norm as norm_op
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

pytestmark = pytest.mark.slow

DECODE = Kind(experts=True, qk_norm=True)
MOST = 10
# Ops by their names in the list of launches.
OPS = {
    "moe_topk_route_quantize": "moe_dispatch",
    "gate_up_proj": "grouped_silu_mul_gemm",
    "down_proj": "grouped_gemm",
    "qkv_proj": "gemm",
    "o_proj": "gemm",
    "router": "apply",
    "add_rms_norm": "forward_norm",
}


def counted(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Count calls of kernels, of vLLM's norms, routers and 16-bit linear layers.

    Calls of the self-check are not counted.
    """
    launched: Counter[str] = Counter()
    patch.setattr(self_check, "check", lambda *_: None)

    def calling(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            launched[name] += 1
            return call(*given, **named)

        return called

    kernels = launch_counts.by_kernel(launched)
    for module in (linear_op, norm_op, op):
        patch.setattr(module, "load_target", kernels)
    for owner, name in (
        (rotation, "rotary_store"), (impl, "rotary_attention"), (impl, "paged_attention"),
        (UnquantizedLinearMethod, "apply"), (CPURouter, "_compute_routing"),
    ):  # fmt: skip
        patch.setattr(owner, name, calling(name, getattr(owner, name)))
    patch.setattr(RMSNorm, "forward_native", calling("forward_norm", RMSNorm.forward_native))
    return launched


def test_launches_of_a_layer(
    calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode takes ten launches: vLLM's norm and router run between the plugin's kernels."""
    plain = moe_checkpoints.save_random(tmp_path / "plain", moe_checkpoints.qwen3())
    model = tmp_path / "model"
    quantize_checkpoint(plain, model, calibrate=calibration, seq_len=64, kv_cache_scheme="fp8")
    launched = counted(monkeypatch)
    run(str(model))
    layers, steps = launched["moe_combine"], launched["rms_norm_quantize"]
    prefill = launched.pop("rotary_store")  # of the text's only step that has many tokens
    assert launched.pop("paged_attention") == prefill == layers / steps
    launched["rotary_attention"] += prefill
    launched["add_rms_norm_quantize"] += launched.pop("rms_norm_quantize")  # of the first layer
    launched["forward_norm"] -= steps  # of the last norm, which feeds the head
    listed = Counter(OPS.get(step.name, step.name) for step in launches(TODAY, DECODE))
    assert {name: count / layers for name, count in launched.items()} == listed
    assert sum(listed.values()) == MOST


@pytest.mark.parametrize("tokens", [1, 8, 64, 256, 512, 1024])
def test_one_launch_brings_tokens_to_their_experts(tokens: int) -> None:
    """Cases: layers of Qwen3-30B and of one DeepSeek V3 rank in eight, at CUDA-graph sizes."""
    for top_k, held, total, width, hidden in ((8, 128, 128, 768, 2048), (8, 32, 256, 2048, 7168)):
        rows = choose_tile_tokens(tokens, top_k, held, total, width, hidden)
        threads = choose_rows(tokens * top_k, hidden, 2, False, SMS).threads
        assert fuse_logits((tokens, top_k), held, rows, threads, True) is not None
