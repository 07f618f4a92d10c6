"""Kernels that write E4M3 activations on sm_90, for any number of tokens. Imports no CuTe."""

from nvfp4_kernels.norm.choose import choose_config as choose_norm
from nvfp4_kernels.norm.tile import MAX_K
from nvfp4_kernels.precompile.model import Dtype, Model
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.quantize.choose import choose_fp8_config as choose_quantize
from nvfp4_kernels.quantize.silu_mul.choose import choose_fp8_config as choose_silu_mul
from nvfp4_kernels.sm90.limits import SMS

_ELEMENT_SIZE = 2  # of bfloat16 and float16
_FAMILY = "nvfp4_kernels.quantize"


def fp8_rows_kernels(
    model: Model, *, max_tokens: int, per_token: bool, sms: int = SMS
) -> dict[KernelSpec, list[str]]:
    """Every kernel that writes an input of ``model``'s linear layers, with the kernel's users.

    Args:
        model: dense decoder.
        max_tokens: maximum number of tokens in a batch; all numbers from 1 on are covered.
        per_token: whether each token has its own scale.
        sms: SMs of the GPU.

    Returns:
        Kernels that quantise the input of a layer, named by the layers; kernels of the norms, if
        the model has a hidden size; and for the inputs of layers after SiLU-mul, as wide as a fused
        gate and up projection, kernels that apply SiLU-mul as well.
    """
    found: dict[KernelSpec, list[str]] = {}
    widths = {layer.n for layer in model.layers if layer.gate_up}
    for layer in model.layers:
        specs = quantize_kernels(model.dtype, layer.k, max_tokens, per_token, sms)
        if layer.k in widths:
            specs += silu_mul_kernels(model.dtype, layer.k, max_tokens, per_token, sms)
        for spec in specs:
            users = found.setdefault(spec, [])
            if layer.name not in users:
                users.append(layer.name)
    if model.hidden:
        specs = norm_kernels(model.dtype, model.dtype, model.hidden, per_token)
        found |= {spec: ["norms"] for spec in specs}
    return found


def quantize_kernels(
    dtype: Dtype, k: int, max_tokens: int, per_token: bool, sms: int = SMS
) -> list[KernelSpec]:
    """Kernels that quantise 1 to ``max_tokens`` rows of ``k`` elements."""
    tiles = [choose_quantize(m, k, _ELEMENT_SIZE, per_token, sms) for m in range(1, max_tokens + 1)]
    target = f"{_FAMILY}.sm90:QuantizeFp8Sm90"
    return [
        KernelSpec("quantize", target, (dtype, per_token, tile)) for tile in dict.fromkeys(tiles)
    ]


def silu_mul_kernels(
    dtype: Dtype, k: int, max_tokens: int, per_token: bool, sms: int = SMS
) -> list[KernelSpec]:
    """Kernels of SiLU-mul to 1 to ``max_tokens`` rows of ``k`` elements."""
    tiles = [choose_silu_mul(m, k, _ELEMENT_SIZE, per_token, sms) for m in range(1, max_tokens + 1)]
    target = f"{_FAMILY}.silu_mul.sm90:SiluMulQuantizeFp8Sm90"
    return [
        KernelSpec("silu_mul_quantize", target, (dtype, per_token, tile))
        for tile in dict.fromkeys(tiles)
    ]


def norm_kernels(dtype: Dtype, weight_dtype: str, k: int, per_token: bool) -> list[KernelSpec]:
    """Kernels of a norm over ``k`` elements, with and without a residual; none for longer rows."""
    if k > MAX_K:
        return []
    target = f"{_FAMILY}.rms_norm.sm90:RmsNormQuantizeFp8Sm90"
    return [
        KernelSpec(
            "rms_norm_quantize", target, (dtype, weight_dtype, adds, per_token, choose_norm(k))
        )
        for adds in (False, True)
    ]
