"""Scaled-down configs of the architectures in vLLM's registry."""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto
from vllm.model_executor.models import registry
from vllm.transformers_utils.config import _CONFIG_REGISTRY

from tests.registry import drafts, multimodal, pooling, shrink, text
from tests.registry.entry import Draft, Entry
from tests.registry.unbuilt import ONLY_CPU, UNBUILT

ENTRIES: Mapping[str, Entry] = text.ENTRIES | pooling.ENTRIES | multimodal.ENTRIES
DRAFTS: Mapping[str, Draft] = drafts.DRAFTS
BAG = "bag"
_OF_LAYERS = "per_layer_config"  # which transformers takes apart itself
# Models that only vLLM's second runner serves; where Triton is installed, it serves others too.
SECOND_RUNNER = {
    "DiffusionGemmaForBlockDiffusion",
    "DFlash2BeamDraftModel",
    "DFlash2DraftModel",
    "DFlashQwen3XPressModel",
    "DSparkDraftModel",
    "DSparkV41DraftModel",
    "Gemma4DSparkModel",
    "K3DSparkModel",
    "LiLiCorrDraftModel",
    "LongcatFlashNgramForCausalLM",
    "MuseSparkDSparkModel",
    "ParseAuxMTPModel",
    "Qwen3DSparkModel",
    "Qwen3OmniDSparkModel",
    "Qwen3XPressModel",
    "Step5ForCausalLM",
    "Step5ForConditionalGeneration",
    "Step5MTP",
}


def architectures() -> list[str]:
    """Names in vLLM's registry, including speculative decoders and the transformers backend."""
    return list(registry._VLLM_MODELS)


def class_of(architecture: str) -> tuple[str, str]:
    """Module and class that vLLM builds for an architecture; aliases share a class."""
    found: tuple[str, str] = registry._VLLM_MODELS[architecture]
    return found


def distinct() -> dict[tuple[str, str], list[str]]:
    """Architectures by the class that vLLM builds for them."""
    classes: dict[tuple[str, str], list[str]] = {}
    for architecture in architectures():
        classes.setdefault(class_of(architecture), []).append(architecture)
    return classes


def buildable(device: str = "meta") -> list[str]:
    """One architecture for each class that can be built here on ``"meta"`` or ``"cpu"``."""
    left_out = UNBUILT.keys() | (ONLY_CPU.keys() if device == "meta" else set())
    found = ([n for n in names if n not in left_out] for names in distinct().values())
    return [names[0] for names in found if names]


def miniature(architecture: str, **changes: Any) -> PreTrainedConfig:
    """Config of an architecture with small sizes and one layer of each kind.

    Args:
        architecture: name in vLLM's registry; for a draft, the result is the draft's own config, or
            the target's config if both share a checkpoint.
        changes: further fields; sub-configs are dictionaries.

    Raises:
        LookupError: no config class is known for the architecture.
    """
    draft = DRAFTS.get(architecture)
    if draft is None:
        return made(architecture, ENTRIES.get(architecture, Entry()), changes)
    if draft.own is not None:
        return made(architecture, draft.own, changes)
    return miniature(draft.target, **shrink.merged(draft.changes, changes))


def made(architecture: str, entry: Entry, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """Config of an entry, with further changes applied."""
    wanted = shrink.merged(entry.changes, changes) | {"architectures": [architecture]}
    if entry.model_type == BAG:
        return bag(deepcopy(wanted), entry.class_name)
    model_type = entry.model_type or _model_types()[architecture]
    config_class = class_for(model_type)
    config = config_class(**_fields(config_class, wanted))
    # vLLM renames a class that several types share to the type that it read last.
    config.model_type = wanted.get("model_type", model_type)
    return config


def _fields(config_class: type[PreTrainedConfig], changes: Mapping[str, Any]) -> dict[str, Any]:
    # A copy: config classes and vLLM modify their arguments.
    fields = deepcopy(shrink.merged(shrink.fields(config_class), changes))
    return {
        name: _part(value).to_dict() if isinstance(value, Entry) else value
        for name, value in fields.items()
        if value is not ...
    }


def _part(entry: Entry) -> PreTrainedConfig:
    """Sub-config that a nested entry describes."""
    if entry.model_type == BAG:
        return bag(deepcopy(dict(entry.changes)))
    config_class = class_for(entry.model_type)
    return config_class(**_fields(config_class, entry.changes))


def class_for(model_type: str) -> type[PreTrainedConfig]:
    """Config class that vLLM uses for a ``model_type``."""
    if model_type in _CONFIG_REGISTRY:
        return _CONFIG_REGISTRY[model_type]
    found: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
    return found


def bag(fields: Mapping[str, Any], class_name: str = PreTrainedConfig.__name__) -> PreTrainedConfig:
    """Config of plain fields; entries become configs, and dictionaries ``*_config`` nested bags."""
    parts = {
        name: _part(value)
        if isinstance(value, Entry)
        else bag(value)
        if name.endswith("_config") and isinstance(value, dict) and name != _OF_LAYERS
        else value
        for name, value in fields.items()
    }
    config: PreTrainedConfig = type(class_name, (PreTrainedConfig,), {})(**parts)
    return config


@cache
def _model_types() -> Mapping[str, str]:
    """Model types by the name of transformers' class."""
    found: dict[str, str] = {}
    for name, table in vars(modeling_auto).items():
        if name.endswith("_MAPPING_NAMES"):
            for model_type, classes in table.items():
                for each in [classes] if isinstance(classes, str) else classes:
                    found.setdefault(each, model_type)
    return found
