"""How each producer names and shapes NVFP4 tensors; pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from nvfp4_kernels.nvfp4 import BLOCK_SIZE, E4M3_MAX, Convention, global_scale_of
from vllm_fp4_plugin.quantizer.tensor_file import TensorSpec
from vllm_fp4_plugin.quantizer.weights import QuantizedWeight


@dataclass(frozen=True)
class Format:
    """One producer's layout.

    Attributes:
        name: of the format, and of the convention its global scales follow.
        weight: parameter of a linear that holds the packed codes, beside ``weight_scale``.
        global_scale: parameter of a linear that holds the weight's global scale.
        input_scale: parameter of a linear that holds the input's global scale.
        k_scale: parameter of an attention module that holds the keys' scale.
        v_scale: parameter of an attention module that holds the values' scale.
        scalar: shape of the global scales.
    """

    name: Convention
    weight: str
    global_scale: str
    input_scale: str
    k_scale: str
    v_scale: str
    scalar: tuple[int, ...]

    def linear_specs(
        self, name: str, shape: tuple[int, ...], has_input_scale: bool
    ) -> dict[str, TensorSpec]:
        """Tensors that replace ``<name>.weight`` of shape ``(rows, K)``."""
        rows, k = shape
        scalars = [self.global_scale, *([self.input_scale] if has_input_scale else [])]
        return {
            f"{name}.{self.weight}": TensorSpec("U8", (rows, k // 2)),
            f"{name}.weight_scale": TensorSpec("F8_E4M3", (rows, k // BLOCK_SIZE)),
            **{f"{name}.{scalar}": TensorSpec("F32", self.scalar) for scalar in scalars},
        }

    def linear_tensors(
        self, name: str, weight: QuantizedWeight, input_amax: Tensor | None
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors that ``linear_specs`` announces; ``input_amax`` is float32 ``()``."""
        yield f"{name}.{self.weight}", weight.data
        yield f"{name}.weight_scale", weight.scales
        yield f"{name}.{self.global_scale}", weight.global_scale.reshape(self.scalar)
        if input_amax is not None:
            scale = global_scale_of(input_amax, self.name)
            yield f"{name}.{self.input_scale}", scale.reshape(self.scalar)

    def kv_tensors(self, attention: str, k_amax: Tensor, v_amax: Tensor) -> dict[str, Tensor]:
        """FP8 scales of an attention module's keys and values, from float32 ``()`` maxima."""
        return {
            f"{attention}.{self.k_scale}": (k_amax / E4M3_MAX).reshape(self.scalar),
            f"{attention}.{self.v_scale}": (v_amax / E4M3_MAX).reshape(self.scalar),
        }


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(
            name="modelopt",
            weight="weight",
            global_scale="weight_scale_2",
            input_scale="input_scale",
            k_scale="k_proj.k_scale",
            v_scale="v_proj.v_scale",
            scalar=(),
        ),
        Format(
            name="compressed-tensors",
            weight="weight_packed",
            global_scale="weight_global_scale",
            input_scale="input_global_scale",
            k_scale="k_scale",
            v_scale="v_scale",
            scalar=(1,),
        ),
    )
}
