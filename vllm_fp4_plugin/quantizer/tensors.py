"""Names, shapes and values of a quantised checkpoint's tensors, by format; pure functions."""

from collections.abc import Iterator

from torch import Tensor

from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE, E4M3_MAX, global_scale_of
from vllm_fp4_plugin.formats import Format
from vllm_fp4_plugin.quantizer.tensor_file import TensorSpec
from vllm_fp4_plugin.quantizer.weights import QuantizedWeight


def linear_specs(
    format: Format, name: str, shape: tuple[int, ...], has_input_scale: bool
) -> dict[str, TensorSpec]:
    """Specs, by name, of the tensors that replace ``<name>.weight`` of shape ``(N, K)``."""
    names, (n, k) = format.names, shape
    specs = {
        f"{name}.{names.weight}": TensorSpec("U8", (n, k // 2)),
        f"{name}.{names.block_scale}": TensorSpec("F8_E4M3", (n, k // BLOCK_SIZE)),
        f"{name}.{names.weight_global}": scalar_spec(format),
    }
    if has_input_scale:
        specs[f"{name}.{names.input_global}"] = scalar_spec(format)
    return specs


def scalar_spec(format: Format) -> TensorSpec:
    """Spec of a global scale, or of a scale of keys or values."""
    return TensorSpec("F32", format.scalar)


def linear_tensors(
    format: Format, name: str, weight: QuantizedWeight, input_amax: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of the tensors that ``linear_specs`` describes.

    Args:
        format: format to write.
        name: name of the linear.
        weight: weight, quantised by the format's convention.
        input_amax: largest magnitude of the linear's inputs, float32 ``()``; None: weight-only.
    """
    names = format.names
    yield f"{name}.{names.weight}", weight.data
    yield f"{name}.{names.block_scale}", weight.scales
    yield f"{name}.{names.weight_global}", weight.global_scale.reshape(format.scalar)
    if input_amax is not None:
        scale = global_scale_of(input_amax, format.name)
        yield f"{name}.{names.input_global}", scale.reshape(format.scalar)


def kv_tensors(format: Format, attention: str, k_amax: Tensor, v_amax: Tensor) -> dict[str, Tensor]:
    """FP8 scales of an attention module's keys and values, by tensor name.

    ``k_amax``, ``v_amax``: largest magnitudes, float32 ``()``.
    """
    names = format.names
    return {
        f"{attention}.{names.k_scale}": (k_amax / E4M3_MAX).reshape(format.scalar),
        f"{attention}.{names.v_scale}": (v_amax / E4M3_MAX).reshape(format.scalar),
    }
