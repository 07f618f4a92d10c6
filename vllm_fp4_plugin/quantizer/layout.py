"""Checkpoint names of a model's tensors, from transformers' own table of conversions."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm_fp4_plugin.quantizer.source import Source

_OF_EXPERT = re.compile(r"(?P<layer>.+)\.(?P<expert>\d+)\.(?P<projection>[^.]+)\.weight")


@dataclass(frozen=True)
class ExpertShard:
    """Weight of one projection of one expert, stored as a tensor of its own.

    Attributes:
        tensor: name of the tensor in the checkpoint.
        layer: name of the layer of experts in the checkpoint.
        projection: name of the projection in the checkpoint.
    """

    tensor: str
    layer: str
    projection: str


@dataclass(frozen=True)
class Layout:
    """Map between a model's tensors and the tensors of the model's checkpoint.

    Attributes:
        tensors: checkpoint name of each of the model's tensors, by model-side name.
        shards: tensors of single experts, by the stack's name in the model, expert number, and
            position among the projections stacked for an expert.
        targets: model-side name of each checkpoint tensor, by checkpoint name; for a tensor that
            the model lacks, the name that it would have.
        others: checkpoint tensors that the model lacks, or takes by an unsupported conversion.
    """

    tensors: dict[str, str] = field(default_factory=dict)
    shards: dict[str, dict[int, dict[int, ExpertShard]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    targets: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    def module(self, name: str) -> str:
        """Checkpoint name of a module, from a tensor of the module; ``name`` if none reveals it."""
        start = f"{name}."
        for own, stored in self.tensors.items():
            if own.startswith(start) and stored.endswith(rest := own.removeprefix(name)):
                return stored.removesuffix(rest)
        return name

    def unknown_modules(self) -> Iterator[str]:
        """Yield the modules of the weights in ``others``, such as further heads or towers."""
        for name in self.others:
            if name.endswith(".weight"):
                yield name.removesuffix(".weight")


def read_layout(model: Any, source: Source) -> Layout:
    """Find the tensors of ``model`` in its checkpoint."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    conversions = get_model_conversion_mapping(model)
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    renamings = [each for each in conversions if not isinstance(each, WeightConverter)]
    own = model.state_dict()
    layout = Layout()
    for name in source.specs:
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, own
        )
        layout.targets[name] = target
        place = _order_of_shard(pattern, converters)
        if pattern is None and target in own:
            layout.tensors[target] = name
        elif place is not None and target in own and (found := _OF_EXPERT.fullmatch(name)):
            shard = ExpertShard(name, found["layer"], found["projection"])
            layout.shards[target][int(found["expert"])][place] = shard
        else:
            layout.others.append(name)
    return layout


def _order_of_shard(pattern: str | None, converters: list[Any]) -> int | None:
    """Position of a projection among an expert's stacked projections; None if not stacked.

    ``pattern``: source pattern of a converter, which matches the name of the projection's tensor;
    None if no pattern does.
    """
    for converter in converters:
        if pattern in converter.source_patterns:
            operations = [type(each).__name__ for each in converter.operations]
            stacks = operations in (["MergeModulelist"], ["MergeModulelist", "Concatenate"])
            return converter.source_patterns.index(pattern) if stacks else None
    return None
