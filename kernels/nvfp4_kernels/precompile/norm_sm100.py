"""Kernels of quantising norms on sm_100, for any number of tokens. Imports no CuTe."""

from nvfp4_kernels.formats.terms import TermLayout
from nvfp4_kernels.precompile.model import Dtype
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.quantize.rms_norm.choose import choose_config
from nvfp4_kernels.sm100.limits import SMS


def norm_kernels(
    dtype: Dtype, weight_dtype: str, k: int, *, max_tokens: int, per_token: bool, terms: int = 1,
    batch_invariant: bool = False, sms: int = SMS,
) -> dict[KernelSpec, list[str]]:  # fmt: skip
    """Kernels of a norm over ``k`` elements, with and without a residual.

    Args:
        dtype: dtype of the input.
        weight_dtype: dtype of the weight.
        k: elements per token.
        max_tokens: maximum number of tokens in a batch; all numbers from 1 on are covered.
        per_token: whether each token gets its own global scale.
        terms: NVFP4 terms of the result.
        batch_invariant: whether the norm is batch-invariant.
        sms: SMs of the GPU.
    """
    layouts = {
        (choose_config(m, k, sms, batch_invariant), TermLayout.of(terms, m)): None
        for m in range(1, max_tokens + 1)
    }
    target = "nvfp4_kernels.quantize.rms_norm.sm100:RmsNormQuantizeSm100"
    return {
        KernelSpec("rms_norm_quantize", target, (dtype, weight_dtype, adds, per_token, *layout)): [
            "norms"
        ]
        for layout in layouts
        for adds in (False, True)
    }
