"""vLLM's norms with a residual on our kernel, which lets the next GEMM start early (PDL)."""

from vllm.config import VllmConfig

from vllm_fp4_plugin.fusion import norm_kernel, norm_module, norm_provider
from vllm_fp4_plugin.report import LayerRecord


def register() -> None:
    """Register our kernel as a provider of vLLM's op, in vLLM releases with IR ops."""
    if norm_kernel.has_ir():
        norm_provider.register()


def make_default(vllm_config: VllmConfig, switched_on: bool) -> LayerRecord | None:
    """Run norms of models built from now on with our kernel, unless the user chose otherwise.

    Args:
        vllm_config: config of the engine.
        switched_on: the user's option ``norm_rope_kernels``.

    Returns:
        Record of the kernel that norms with a residual use, with the reason; None on a device
        without a kernel of ours.
    """
    kernel = norm_kernel.find()
    if kernel is None:
        return None
    seam = norm_provider if norm_kernel.has_ir() else norm_module
    return seam.make_default(vllm_config, kernel, switched_on)
