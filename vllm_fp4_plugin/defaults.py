"""Default kernels of attention, activations, norms and rotary embeddings: ours where possible."""

from typing import Any

from vllm_fp4_plugin import batch_invariance
from vllm_fp4_plugin.attention import choice
from vllm_fp4_plugin.fusion import add_rms_norm, gate_up, norm_quantize, rotary
from vllm_fp4_plugin.options import Options
from vllm_fp4_plugin.report import Report


def choose(vllm_config: Any, options: Options, report: Report) -> str:
    """Choose kernels of attention, activations, norms and rotary embeddings for models built later.

    Args:
        vllm_config: config of the engine; attention backend and op priorities may be changed.
        options: options of the user.
        report: gets records of norms and rotary embeddings, where there is a choice.

    Returns:
        Reason for the backend of attention layers, for the report.
    """
    if options.fuse_mlp:
        gate_up.enable()
    if options.fuse_norm:
        norm_quantize.enable()
    attention = choice.make_default(vllm_config)
    if batch_invariance.is_wanted():
        return attention  # vLLM's first provider is then batch-invariant, under any priority
    for record in (
        add_rms_norm.make_default(vllm_config, options.norm_rope_kernels),
        rotary.make_default(options.norm_rope_kernels),
    ):
        if record is not None:
            report.add(record)
    return attention
