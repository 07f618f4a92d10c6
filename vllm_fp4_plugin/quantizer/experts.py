"""Layers of experts: locations of the weights, the activation, and checks before quantising."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from vllm_fp4_plugin.quantizer.errors import QuantizerError
from vllm_fp4_plugin.quantizer.layout import Layout
from vllm_fp4_plugin.quantizer.source import FLOAT_DTYPES, Source
from vllm_fp4_plugin.quantizer.stored import StoredWeight

# Class that multiplies its input by the router's weight, with a block of a different signature.
_WEIGHS_INPUT = "Llama4TextExperts"


@dataclass(frozen=True)
class ExpertsLayer:
    """Experts of one decoder layer.

    Attributes:
        module: name of the experts' module in the model.
        name: name of the experts in the checkpoint; the quantised copy calls expert i
            ``<name>.<i>``.
        experts: weights of each expert, by projection: gate and up, or up alone, then down.
        weighs_input: whether the routing weight multiplies the input instead of the output.
    """

    module: str
    name: str
    experts: list[dict[str, StoredWeight]]
    weighs_input: bool

    @property
    def first(self) -> list[str]:
        """Names of the projections that take the layer's input."""
        return list(self.experts[0])[:-1]

    @property
    def last(self) -> str:
        """Name of the projection that computes the output."""
        return list(self.experts[0])[-1]

    def linear(self, expert: int, projection: str) -> str:
        """Name of a linear in the quantised checkpoint."""
        return f"{self.name}.{expert}.{projection}"

    def linears(self) -> Iterator[tuple[str, StoredWeight]]:
        """Yield the linears' names and weights."""
        for number, expert in enumerate(self.experts):
            for projection, weight in expert.items():
                yield self.linear(number, projection), weight


def find_experts(model: nn.Module, layout: Layout, source: Source) -> list[ExpertsLayer]:
    """Find the layers of experts of a model.

    Raises:
        QuantizerError: the message names experts that cannot be quantised, or a missing weight.
    """
    layers = [
        _layer(name, module, layout, source)
        for name, module in model.named_modules()
        if _are_experts(module)
    ]
    claimed = {weight.tensor for layer in layers for _, weight in layer.linears()}
    unknown = claimed.union(layout.others)
    for name in source.specs:
        if ".experts." in name and name not in unknown:
            raise QuantizerError(
                f"{name}: belongs to experts that {type(model).__name__} does not keep as stacks "
                "of gate, up and down projections; quantise it with its producer's tool"
            )
    return layers


def activate(module: Any, projected: Tensor) -> Tensor:
    """Compute the input of an expert's down projection.

    Args:
        module: module of the layer's experts, which has the activation.
        projected: output of the first projections: gate and up, concatenated along the last axis,
            or up alone.
    """
    if not getattr(module, "has_gate", True):
        return module.act_fn(projected)
    if hasattr(module, "_apply_gate"):
        return module._apply_gate(projected)
    gate, up = projected.chunk(2, dim=-1)
    return up * module.act_fn(gate)


def check_blocks(layer: ExpertsLayer) -> None:
    """Check that the rows of all weights consist of whole blocks of 16 elements.

    Raises:
        QuantizerError: the message names the first weight with a partial block.
    """
    for name, weight in layer.linears():
        if weight.shape[1] % BLOCK_SIZE:
            raise QuantizerError(
                f"{name}.weight: K is {weight.shape[1]}, must be a multiple of {BLOCK_SIZE}; keep "
                f"such experts as they are with --ignore {layer.name}"
            )


def _are_experts(module: nn.Module) -> bool:
    return any(
        p.ndim == 3 and key == "down_proj" for key, p in module._parameters.items() if p is not None
    )


def _layer(name: str, module: Any, layout: Layout, source: Source) -> ExpertsLayer:
    weighs_input = type(module).__name__ == _WEIGHS_INPUT
    _refuse_arithmetic(name, module, weighs_input)
    is_transposed = weighs_input or module.is_transposed
    gated = hasattr(module, "gate_up_proj")
    first = "gate_up_proj" if gated else "up_proj"
    parts = {first: ["gate_proj", "up_proj"] if gated else ["up_proj"], "down_proj": ["down_proj"]}
    layer_name = name
    experts: list[dict[str, StoredWeight]] = [{} for _ in range(len(module.down_proj))]
    for key, projections in parts.items():
        stack, shape = f"{name}.{key}", tuple(module._parameters[key].shape)
        if stack in layout.tensors:
            tensor = layout.tensors[stack]
            layer_name = _layer_name(tensor, key)
            _check(tensor, shape, source)
            for number, expert in enumerate(experts):
                expert |= _slices(tensor, shape, projections, number, is_transposed)
            continue
        for number, expert in enumerate(experts):
            shards = layout.shards[stack][number]
            if len(shards) < len(projections):
                raise QuantizerError(
                    f"{stack}: the model has it, the checkpoint lacks "
                    f"{projections[0] if not shards else projections[1]} of expert {number}; save "
                    "it anew with the transformers version in use"
                )
            for place in sorted(shards):
                shard = shards[place]
                layer_name = shard.layer
                n, k = shape[1] // len(projections), shape[2]
                _check(shard.tensor, (n, k), source)
                expert[shard.projection] = StoredWeight(shard.tensor, (n, k))
    return ExpertsLayer(name, layer_name, experts, weighs_input)


def _layer_name(stack: str, key: str) -> str:
    """Checkpoint name of the experts, from the name ``<experts>.<key>`` of a stacked tensor."""
    name = stack.removesuffix(f".{key}")
    if name == stack or not name.endswith("experts"):
        raise QuantizerError(
            f"{stack}: stacks experts, must be called …experts.{key} for engines to know what "
            "single experts are called; quantise the model with its producer's tool"
        )
    return name


def _slices(
    tensor: str, shape: tuple[int, ...], projections: list[str], expert: int, is_transposed: bool
) -> dict[str, StoredWeight]:
    """Locations of one expert's weights in a stacked tensor, by projection."""
    rows, k = (shape[2], shape[1]) if is_transposed else (shape[1], shape[2])
    n = rows // len(projections)
    return {
        projection: StoredWeight(tensor, (n, k), expert, place * n, is_transposed)
        for place, projection in enumerate(projections)
    }


def _refuse_arithmetic(name: str, module: Any, weighs_input: bool) -> None:
    """Refuse experts with biases, with interleaved rows of gate and up, or of an unknown class."""
    if not (weighs_input or hasattr(module, "has_gate")):
        unsupported_reason = f"are {type(module).__name__}, whose arithmetic is unknown"
    elif getattr(module, "has_bias", False):
        unsupported_reason = f"have biases ({type(module).__name__}), which no NVFP4 experts take"
    elif not getattr(module, "is_concatenated", True):
        unsupported_reason = f"interleave the rows of gate and up ({type(module).__name__})"
    else:
        return
    raise QuantizerError(
        f"{name}: its experts {unsupported_reason}; must be stacks of gate, up and down without "
        "biases; quantise the model with its producer's tool"
    )


def _check(tensor: str, shape: tuple[int, ...], source: Source) -> None:
    spec = source.specs[tensor]
    if spec.shape != shape:
        raise QuantizerError(
            f"{tensor}: shape is {spec.shape}, config.json asks for {shape}; mend config.json"
        )
    if spec.dtype not in FLOAT_DTYPES:
        raise QuantizerError(
            f"{tensor}: dtype is {spec.dtype}, must be {', '.join(FLOAT_DTYPES)}; convert it"
        )
