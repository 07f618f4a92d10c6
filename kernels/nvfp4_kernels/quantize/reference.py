"""``quantize`` in torch: the reference, which is also the CPU kernel."""

from torch import Tensor

from nvfp4_kernels.formats.fp8_rows import quantize_fp8, token_scales
from nvfp4_kernels.formats.nvfp4 import row_global_scales
from nvfp4_kernels.formats.output import Fp8Output, Nvfp4Output, PerToken, Static, StaticFp8
from nvfp4_kernels.formats.terms import quantize_terms
from nvfp4_kernels.quantize.call import QuantizeCall


def quantize(call: QuantizeCall) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.quantize.op.quantize``."""
    return quantize_rows(*call)


def quantize_rows(x: Tensor, output: Nvfp4Output | Fp8Output) -> tuple[Tensor, ...]:
    """Quantise ``x`` to ``output``; with a scale per row, return these, too."""
    if isinstance(output, Static):
        return quantize_terms(x, *output)
    if isinstance(output, PerToken):
        row_scale = row_global_scales(x)
        return (*quantize_terms(x, row_scale, output.terms), row_scale)
    if isinstance(output, StaticFp8):
        return (quantize_fp8(x, output.scale),)
    row_scale = token_scales(x)
    return quantize_fp8(x, row_scale), row_scale
