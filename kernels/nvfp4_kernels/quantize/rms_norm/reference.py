"""Norms that quantise, in torch: the reference, which is also the CPU kernel.

Roundings are those of ``add_rms_norm``, also without a residual.
"""

from torch import Tensor

from nvfp4_kernels.norm.call import AddRmsNormCall
from nvfp4_kernels.norm.reference import add_rms_norm, rms_norm
from nvfp4_kernels.quantize.call import RmsNormQuantizeCall
from nvfp4_kernels.quantize.reference import quantize_rows


def rms_norm_quantize(call: RmsNormQuantizeCall) -> tuple[Tensor, ...]:
    """See ``rms_norm_quantize`` and ``add_rms_norm_quantize`` in ``rms_norm.op``."""
    x, residual, weight, eps, output, out = call
    if residual is None:
        return quantize_rows(rms_norm(x.float(), weight, eps, x.dtype), output)
    norm, total = add_rms_norm(AddRmsNormCall(x, residual, weight, eps))
    total = total if out is None else out.copy_(total)
    return (*quantize_rows(norm, output), total)
