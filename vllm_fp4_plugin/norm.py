"""vLLM's ``fused_add_rms_norm`` on our kernel, which lets the product after it start early.

vLLM asks a list of providers for each of its own ops; ours comes first where it has a kernel.
"""

from torch import Tensor
from vllm import ir
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from nvfp4_kernels import add_rms_norm
from nvfp4_kernels.add_rms_norm.kernels import DTYPES, KERNELS
from nvfp4_kernels.add_rms_norm.tile import MAX_K, VECTOR
from vllm_fp4_plugin.device import current_device
from vllm_fp4_plugin.options import NORM_ROPE_KERNELS_OFF
from vllm_fp4_plugin.report import LayerRecord

OP = "fused_add_rms_norm"
PROVIDER = "nvfp4_tc"


def takes(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    """Whether the kernel can run on these; vLLM asks the next provider if not."""
    return (
        variance_size is None
        and weight is not None
        and x.dtype in DTYPES
        and x.dtype == x_residual.dtype == weight.dtype
        and x.ndim == 2
        and x.shape[1] % VECTOR == 0
        and x.shape[1] <= MAX_K
        and all(each.stride(1) == 1 and each.stride(0) % VECTOR == 0 for each in (x, x_residual))
    )


def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run ``vllm.ir.ops.fused_add_rms_norm`` on arguments that ``takes`` accepts."""
    assert weight is not None
    return add_rms_norm(x, x_residual, weight, epsilon)


def register() -> None:
    """Have vLLM know of ``nvfp4_tc``, so that ``--ir-op-priority`` can name it."""
    op = ir.ops.fused_add_rms_norm
    if PROVIDER not in op.impls:
        op.register_impl(PROVIDER, supports_args=takes)(fused_add_rms_norm)


def make_default(vllm_config: VllmConfig, switched_on: bool) -> LayerRecord | None:
    """Put our provider first, for models built from now on, unless the user has named another.

    Returns:
        Record of what runs the op, and why; None on a device without a kernel for it.
    """
    kernel = KERNELS.find(current_device(), "float")
    if kernel is None or kernel.arch == "cpu":
        return None
    priority: list[str] = getattr(vllm_config.kernel_config.ir_op_priority, OP)
    default = getattr(current_platform.get_default_ir_op_priority(vllm_config), OP)
    named = [provider for provider in priority if provider != PROVIDER]
    reason = "" if switched_on else NORM_ROPE_KERNELS_OFF
    if named != default or (PROVIDER in priority and not switched_on):
        reason = f"--ir-op-priority.{OP}={','.join(priority)}"
    elif switched_on:
        priority[:] = [PROVIDER, *default]
        ir.ops.fused_add_rms_norm.set_default(priority)
        if vllm_config.compilation_config.pass_config.fuse_allreduce_rms:
            reason = "where vLLM does not fuse it with an all-reduce"
    label = kernel.label if priority[0] == PROVIDER else f"{priority[0]} (vLLM)"
    return LayerRecord(OP, label, "16-bit", reason, 0, 0)
