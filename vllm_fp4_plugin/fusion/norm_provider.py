"""Provider of vLLM's op ``fused_add_rms_norm``, for vLLM releases with IR ops.

vLLM keeps a priority list of providers per op; ours comes first on devices with a kernel. vLLM's
passes see the op before a provider is chosen, so all-reduce fusion still applies.
"""

from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from nvfp4_kernels import add_rms_norm
from nvfp4_kernels.dispatch import Kernel
from vllm_fp4_plugin.fusion.norm_kernel import OP, takes
from vllm_fp4_plugin.options import NORM_ROPE_KERNELS_OFF
from vllm_fp4_plugin.report import LayerRecord

PROVIDER = "nvfp4_tc"


def _op() -> Any:
    from vllm import ir  # not at the top: later releases have no IR

    return ir.ops.fused_add_rms_norm


def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Implement ``vllm.ir.ops.fused_add_rms_norm`` for arguments that ``takes`` accepts."""
    assert weight is not None
    return add_rms_norm(x, x_residual, weight, epsilon)


def register() -> None:
    """Register the provider ``nvfp4_tc``, so that ``--ir-op-priority`` accepts its name."""
    op = _op()
    if PROVIDER not in op.impls:
        op.register_impl(PROVIDER, supports_args=takes)(fused_add_rms_norm)


def make_default(vllm_config: VllmConfig, kernel: Kernel, switched_on: bool) -> LayerRecord:
    """Put our provider first for models built from now on.

    The order stays if the user has named providers, or has switched our kernel off.

    Args:
        vllm_config: config of the engine.
        kernel: our kernel for this process's device.
        switched_on: the user's option ``norm_rope_kernels``.

    Returns:
        Record of the op's provider, with the reason.
    """
    priority: list[str] = getattr(vllm_config.kernel_config.ir_op_priority, OP)
    default = getattr(current_platform.get_default_ir_op_priority(vllm_config), OP)
    named = [provider for provider in priority if provider != PROVIDER]
    reason = "" if switched_on else NORM_ROPE_KERNELS_OFF
    if named != default or (PROVIDER in priority and not switched_on):
        reason = f"--ir-op-priority.{OP}={','.join(priority)}"
    elif switched_on:
        priority[:] = [PROVIDER, *default]
        _op().set_default(priority)
        if vllm_config.compilation_config.pass_config.fuse_allreduce_rms:
            reason = "where vLLM does not fuse it with an all-reduce"
    label = kernel.label if priority[0] == PROVIDER else f"{priority[0]} (vLLM)"
    return LayerRecord(OP, label, "16-bit", reason, 0, 0)
