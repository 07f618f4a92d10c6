"""Models of vLLM that make assumptions about the quantization config's class.

The code of each such model was read: most only ask the config for methods, and are served. Models
that refuse our config, or read a quantised layer's weight directly, are refused here before any
weight is loaded, with a remedy in the message.
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
    # This model multiplies with qkv_proj.weight, and casts hidden states to the dtype of fc.weight.
    "MuseSparkDSparkModel": (
        "vLLM's model reads the weights of its layers as 16-bit values",
        "give a draft in 16 bits, and no quantization in --speculative-config",
    ),
}
_MEGA_MOE = "deep_gemm_mega_moe"
# Layers whose weight vLLM's model multiplies directly, and requires in 16 bits.
_PLAIN = ("Step5FusedQKVIndexerLinear",)


def check(hf_config: Any) -> None:
    """Check that vLLM's model works with our quantization config.

    Raises:
        UnsupportedCheckpoint: the model refuses the config, or reads quantised weights as 16-bit
            values.
    """
    for architecture in getattr(hf_config, "architectures", None) or ():
        if architecture in _REFUSALS:
            why, remedy = _REFUSALS[architecture]
            raise UnsupportedCheckpoint(
                f"{architecture}: cannot be served with {METHOD}: {why}; {remedy}"
            )


def check_experts(vllm_config: Any) -> None:
    """Check that experts get their method from the quantization config.

    Raises:
        UnsupportedCheckpoint: the user requested vLLM's mega-kernel, which replaces the layer of
            experts: some models then refuse our config, others misread NVFP4 codes as the
            mega-kernel's format.
    """
    backend = vllm_config.kernel_config.moe_backend
    if backend == _MEGA_MOE and vllm_config.model_config.is_moe:
        raise UnsupportedCheckpoint(
            f"--moe-backend: is {_MEGA_MOE}, whose experts {METHOD} does not serve, must be "
            "another; serve without --moe-backend, or with --quantization modelopt"
        )


def is_plain(layer: Any) -> bool:
    """Whether vLLM's model multiplies by the layer's weight itself, which must be in 16 bits."""
    return type(layer).__name__ in _PLAIN


def not_plain(prefix: str, kind: Any) -> UnsupportedCheckpoint:
    """Error for a quantised layer by whose weight vLLM's model multiplies itself."""
    return UnsupportedCheckpoint(
        f"{prefix}: is {kind}, must be in 16 bits: vLLM's model multiplies its weight, and a "
        "sparse indexer's with it, by itself; quantise the model with these projections excluded"
    )
