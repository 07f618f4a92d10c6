"""Gate and up projection, SiLU and multiplication as one op, without touching vLLM's models.

vLLM's gated MLPs call ``gate_up_proj(x)`` and hand the result straight to ``SiluAndMul``. For
layers that allow it, the projection returns a ``GateUp``, a promise that holds its input; our
``SiluAndMul`` recognises it and calls the fused op. Plain tensors take vLLM's path.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from vllm_fp4_plugin.linear_op import silu_mul_linear
from vllm_fp4_plugin.options import Options

# Models whose MLP forward passes were read: the projection's result goes to SiluAndMul and nowhere
# else. A model that scales, splits or inspects it in between must not be here.
ARCHITECTURES = frozenset(
    {
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "Exaone4ForCausalLM",
        "GraniteForCausalLM",
        "IQuestCoderForCausalLM",
        "InternLM2ForCausalLM",
        "InternLM3ForCausalLM",
        "LlamaForCausalLM",
        "Ministral3ForCausalLM",
        "MistralForCausalLM",
        "OrionForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "SolarForCausalLM",
        "StableLmForCausalLM",
        "TeleChat3ForCausalLM",
    }
)


@dataclass(frozen=True)
class GateUp:
    """Promise of the product of a fused gate and up projection.

    Attributes:
        x: input of the projection, ``(..., K)``.
        layer: the projection.
        n: I, width of gate and up projection on this rank.
        kernel: target of its kernel, see ``linear_op.silu_mul_linear``.
        quantizer: target of its input's kernel, or None.
    """

    x: Tensor
    layer: Any
    n: int
    kernel: str
    quantizer: str | None

    def silu_and_mul(self) -> Tensor:
        """Compute ``silu(gate) · up``: ``(..., I)`` of x's dtype."""
        layer = self.layer
        return silu_mul_linear(
            self.x, layer.weight, layer.weight_scale, layer.alpha, self.n, layer.input_scale,
            self.kernel, self.quantizer,
        )  # fmt: skip

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"gate_up_proj was fused with its activation, but the model asked its result for "
            f'{name!r}; serve with --additional-config \'{{"nvfp4_tc": {{"fuse_mlp": false}}}}\''
        )


class FusedSiluAndMul(SiluAndMul):
    """``SiluAndMul`` that also takes a ``GateUp``."""

    def forward(self, x: "Tensor | GateUp", *args: Any, **kwargs: Any) -> Tensor:
        """Compute ``silu(gate) · up`` of a tensor ``(..., 2I)`` or of a promise of one."""
        if isinstance(x, GateUp):
            return x.silu_and_mul()
        return super().forward(x, *args, **kwargs)


def enable() -> None:
    """Put ``FusedSiluAndMul`` in the place of vLLM's class, for models built from now on."""
    if op_registry_oot.get("SiluAndMul") is None:
        SiluAndMul.register_oot(FusedSiluAndMul)
        # Registration renames the class; custom_ops directives go by the original name.
        FusedSiluAndMul.name = SiluAndMul.name


def obstacle(layer: Any, prefix: str, options: Options) -> str | None:
    """Reason against fusing a layer with its activation: ``""`` if it has none, None if it can."""
    if prefix.rpartition(".")[2] != "gate_up_proj":
        return ""
    vllm_config = get_current_vllm_config()
    model = vllm_config.model_config
    architecture = model.architecture
    activation = getattr(model.hf_text_config, "hidden_act", None)
    sizes = layer.output_partition_sizes
    reasons = {
        "not fused: switched off (fuse_mlp)": not options.fuse_mlp,
        f"not fused: {architecture} is not known to allow it": architecture not in ARCHITECTURES,
        f"not fused: hidden_act is {activation}": activation != "silu",
        "not fused: LoRA is enabled": vllm_config.lora_config is not None,
        "not fused: the projection has a bias": layer.has_bias,
        "not fused: its output is gathered": getattr(layer, "gather_output", False),
        "not fused: it is not a pair of equal column-parallel shards": (
            type(layer) is not MergedColumnParallelLinear or len(sizes) != 2 or sizes[0] != sizes[1]
        ),
        "not fused: another plugin replaces SiluAndMul": (
            op_registry_oot.get("SiluAndMul") is not FusedSiluAndMul
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
