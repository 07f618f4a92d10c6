"""RMSNorm that runs on our kernel when it adds a residual, for vLLM releases without IR ops.

vLLM builds our class instead of vLLM's ``RMSNorm``.
"""

from typing import Any

from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.layernorm import RMSNorm

from nvfp4_kernels import add_rms_norm
from nvfp4_kernels.dispatch import Kernel
from vllm_fp4_plugin import batch_invariance
from vllm_fp4_plugin.fusion import norm_kernel
from vllm_fp4_plugin.options import METHOD, NORM_ROPE_KERNELS_OFF, Options
from vllm_fp4_plugin.report import LayerRecord


class NormOnOurKernel(RMSNorm):
    """``RMSNorm`` that runs on our kernel if the call has a residual and supported arguments.

    Attributes:
        ours: whether our kernel may run; False in vLLM releases with IR ops, see
            ``norm_provider``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        self.ours = (
            not norm_kernel.has_ir()
            and norm_kernel.find() is not None
            and not batch_invariance.is_wanted()
            and _is_our_engine(config)
            and not unsupported_reason(config, Options.of(config).norm_rope_kernels)
        )

    def forward(self, x: Any, residual: Tensor | None = None) -> Any:
        """See ``RMSNorm.forward_native``."""
        weight = self.weight.data if self.has_weight else None
        given = weight, self.variance_epsilon, self.variance_size_override
        if self.ours and residual is not None and norm_kernel.takes(x, residual, *given):
            return add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)
        return super().forward(x, residual)


def _is_our_engine(config: VllmConfig) -> bool:
    quantization: Any = config.quant_config
    return quantization is not None and quantization.get_name() == METHOD


def unsupported_reason(config: VllmConfig, switched_on: bool) -> str:
    """Reason why the engine's norms stay on vLLM's kernel; empty if there is none.

    ``switched_on``: the user's option ``norm_rope_kernels``.
    """
    passes = config.compilation_config.pass_config
    taken = op_registry_oot.get("RMSNorm", NormOnOurKernel)
    reasons = {
        NORM_ROPE_KERNELS_OFF: not switched_on,
        "another plugin replaces RMSNorm": not issubclass(taken, NormOnOurKernel),
        # vLLM's pass matches its own norms only.
        "vLLM fuses it with an all-reduce": passes.fuse_allreduce_rms,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def put_in_place(ours: Any) -> None:
    """Make vLLM build the class ``ours`` instead of vLLM's ``RMSNorm``.

    If a base class of ``ours`` was put in place earlier, ``ours`` replaces that class; a class of
    another plugin stays.
    """
    taken = op_registry_oot.get("RMSNorm")
    if taken is None or (issubclass(ours, taken) and ours is not taken):
        op_registry_oot.pop("RMSNorm", None)
        RMSNorm.register_oot(ours)
        # Registration renames the class; custom_ops directives use the original name.
        ours.name = RMSNorm.name


def make_default(vllm_config: VllmConfig, kernel: Kernel, switched_on: bool) -> LayerRecord:
    """Replace vLLM's ``RMSNorm`` with ours for models built from now on.

    Returns:
        Record of the kernel of norms with a residual, with the reason.
    """
    put_in_place(NormOnOurKernel)
    reason = unsupported_reason(vllm_config, switched_on)
    return LayerRecord(norm_kernel.OP, "vLLM" if reason else kernel.label, "16-bit", reason, 0, 0)
