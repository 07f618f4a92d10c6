"""Records of layers of experts, for the report."""

from typing import Any

from vllm_fp4_plugin.experts.plan import ExpertsPlan
from vllm_fp4_plugin.experts.weights import experts_bytes
from vllm_fp4_plugin.report import LayerRecord


def own_record(config: Any, prefix: str, plan: ExpertsPlan, reason: str) -> LayerRecord:
    """Record of experts that our kernels serve.

    Args:
        config: vLLM's MoE config of the layer.
        prefix: name of the layer.
        plan: kernels of the layer.
        reason: reason for the layer's scheme; may be empty.
    """
    h, i = config.hidden_dim, config.intermediate_size_per_partition
    count, projections = config.num_local_experts, 2 if plan.gated else 1
    return LayerRecord(
        prefix,
        plan.first.label,
        plan.arithmetic,
        "; ".join(filter(None, (reason, plan.reason))),
        count * (projections + 1) * h * i,
        experts_bytes(count, projections, h, i, plan),
    )


def unquantized(layer: Any, prefix: str, reason: str) -> LayerRecord:
    """Record of experts that vLLM runs in 16 bits for ``reason``."""
    elements = sum(count * n * k for count, n, k in matrices(layer.moe_config))
    return LayerRecord.unquantized(prefix, reason, elements, elements * layer.params_dtype.itemsize)


def matrices(config: Any) -> list[tuple[int, int, int]]:
    """Count, rows and columns of this rank's matrices: gate and up, then down."""
    h, i, e = config.hidden_dim, config.intermediate_size_per_partition, config.num_local_experts
    return [(e * (2 if config.is_act_and_mul else 1), i, h), (e, h, i)]
