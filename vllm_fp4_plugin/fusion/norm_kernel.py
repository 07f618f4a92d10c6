"""Kernel for vLLM's norms with a residual: lookup by device, and supported arguments."""

from importlib.util import find_spec

from torch import Tensor

from nvfp4_kernels.device.row_vectors.tile import VECTOR
from nvfp4_kernels.dispatch import Kernel
from nvfp4_kernels.norm.kernels import DTYPES, KERNELS
from nvfp4_kernels.norm.tile import MAX_K
from vllm_fp4_plugin.device import current_device

OP = "fused_add_rms_norm"


def find() -> Kernel | None:
    """Kernel for this process's device; None if only the reference exists."""
    kernel = KERNELS.find(current_device(), "float")
    return None if kernel is None or kernel.arch == "cpu" else kernel


def has_ir() -> bool:
    """Whether vLLM defines its norms as IR ops, as 0.32 and 0.33 do."""
    return find_spec("vllm.ir") is not None


def takes(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    """Whether the kernel supports these arguments; if not, vLLM's norm runs."""
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
