"""Demands of vLLM's models on the quantization config, which they know by its class, or ignore.

What a model does with a config of a class that it does not know was read of each: most ask it for
methods and are served. Those that refuse it, or read the weights of its layers by themselves, are
refused here, before anything is loaded, in a line that says what to do.
"""

from typing import Any

from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.options import METHOD

_SERVE_OTHERWISE = "serve an NVFP4 checkpoint with --quantization modelopt, a 16-bit one without"
_REFUSALS = {
    "MuseSparkForConditionalGeneration": (
        "vLLM's model takes no quantization but modelopt's",
        _SERVE_OTHERWISE,
    ),
    # It multiplies with qkv_proj.weight, and casts hidden states to the dtype of fc.weight.
    "MuseSparkDSparkModel": (
        "vLLM's model reads the weights of its layers as 16-bit values",
        "give a draft in 16 bits, and no quantization in --speculative-config",
    ),
}
_MEGA_MOE = "deep_gemm_mega_moe"
# Layers whose weight vLLM's model multiplies by itself, and which it asks to be in 16 bits.
_PLAIN = ("Step5FusedQKVIndexerLinear",)


def check(hf_config: Any) -> None:
    """Check that vLLM's model takes our quantization config.

    Raises:
        UnsupportedCheckpoint: it does not.
    """
    for architecture in getattr(hf_config, "architectures", None) or ():
        if architecture in _REFUSALS:
            why, remedy = _REFUSALS[architecture]
            raise UnsupportedCheckpoint(
                f"{architecture}: cannot be served with {METHOD}: {why}; {remedy}"
            )


def check_experts(vllm_config: Any) -> None:
    """Check that experts ask the quantization config for their method.

    Raises:
        UnsupportedCheckpoint: the user asked for vLLM's mega-kernel, which models build in place of
            a layer of experts: some refuse our config, others take its codes for their own format.
    """
    backend = vllm_config.kernel_config.moe_backend
    if backend == _MEGA_MOE and vllm_config.model_config.is_moe:
        raise UnsupportedCheckpoint(
            f"--moe-backend: is {_MEGA_MOE}, whose experts {METHOD} does not serve, must be "
            "another; serve without --moe-backend, or with --quantization modelopt"
        )


def is_plain(layer: Any) -> bool:
    """Whether vLLM's model multiplies with a layer's weight itself, which must be in 16 bits."""
    return type(layer).__name__ in _PLAIN


def not_plain(prefix: str, kind: Any) -> UnsupportedCheckpoint:
    """Error of such a layer that is quantised."""
    return UnsupportedCheckpoint(
        f"{prefix}: is {kind}, must be in 16 bits: vLLM's model multiplies its weight, and a "
        "sparse indexer's with it, by itself; quantise the model with these projections excluded"
    )
