"""Launch counts of an engine, taken where the plugin calls kernels and vLLM's functions."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from nvfp4_kernels.dispatch import load_target
from vllm_fp4_plugin.attention import cache, impl, rotation
from vllm_fp4_plugin.fusion.self_check import run as self_check
from vllm_fp4_plugin.ops import all_reduce, flashinfer_all_reduce
from vllm_fp4_plugin.ops import linear as linear_op
from vllm_fp4_plugin.ops import norm as norm_op

# Names of ops' kernels, by their names in the list of launches.
OPS = dict.fromkeys(("qkv_proj", "o_proj", "down_proj"), "gemm") | {"gate_up_proj": "silu_mul_gemm"}
ALL_REDUCE, FUSED = "all_reduce", "all_reduce_add_rms_norm_quantize"
_REDUCE = "tensor_model_parallel_all_reduce"


def watch(patch: pytest.MonkeyPatch) -> "Counter[str]":
    """Count launches from now on, by kernel or function, except those of the self-check."""
    launched: Counter[str] = Counter()
    patch.setattr(self_check, "check", lambda *_: None)

    def count(owner: Any, name: str, called: str = "") -> None:
        original = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            launched[called or name] += 1
            return original(*given, **named)

        patch.setattr(owner, name, call)

    counted = by_kernel(launched)
    for module in (linear_op, norm_op, all_reduce):
        patch.setattr(module, "load_target", counted)
    for owner, name in (
        (rotation, "rotary_store"),
        (impl, "rotary_attention"),
        (impl, "paged_attention"),
        (RotaryEmbedding, "forward"),
        (RMSNorm, "forward_native"),
        (RMSNorm, "forward_cuda"),
        (cache, "write"),
    ):
        count(owner, name)
    count(flashinfer_all_reduce, "run", FUSED)
    for owner in (vllm_linear, all_reduce):
        count(owner, _REDUCE, ALL_REDUCE)
    return launched


def by_kernel(launched: "Counter[str]") -> Callable[[str], Callable[..., Any]]:
    """Make a substitute for ``dispatch.load_target`` that counts the calls of each kernel.

    A norm that quantises counts as ``add_rms_norm_quantize`` if the call has a residual.
    """

    def counted(target: str) -> Callable[..., Any]:
        kernel, name = load_target(target), target.partition(":")[2]

        def call(*given: Any) -> Any:
            adds = getattr(given[0], "residual", None) is not None
            launched["add_" * adds + name] += 1
            return kernel(*given)

        return call

    return counted


def of_a_layer(launched: "Counter[str]") -> dict[str, float]:
    """Launches per layer of a two-layer model, in decodes and prefills.

    The first norm of a step has no residual, and the last layer's sum is all-reduced before vLLM's
    last norm: these two launches count together as the norm and all-reduce of an inner layer.
    """
    launched = launched.copy()
    assert launched.pop("forward_native")  # the last norm, which feeds the head
    layers = launched["silu_mul_gemm"]  # of all steps
    prefill = launched.pop("rotary_store")  # of the text's only step that has many tokens
    assert launched.pop("paged_attention") == prefill
    launched["rotary_attention"] += prefill
    first = launched.pop("rms_norm_quantize")
    assert first == layers / 2
    if launched[FUSED]:
        assert launched.pop(ALL_REDUCE) == first  # of the last layers' sums
        launched[FUSED] += first
    else:
        launched["add_rms_norm_quantize"] += first
    return {name: count / layers for name, count in launched.items() if count}
