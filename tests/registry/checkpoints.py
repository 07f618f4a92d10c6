"""Checkpoints of scaled-down models by name, dtype and shape, as transformers would write them."""

import re
from collections.abc import Iterator, Mapping

import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import set_current_vllm_config

from tests.catalogue.hub_classes import of_transformers
from tests.registry import configs
from tests.registry.session import Built
from vllm_fp4_plugin.checkpoint.arrivals import Checkpoint
from vllm_fp4_plugin.checkpoint.completeness import CompleteLoad

Tensors = Mapping[str, Tensor]

# Names on the hub, by the names of transformers' models once their renaming on load is undone.
_RENAMED = {
    r"^language_model\.model\.model\.": "language_model.model.",
    r"^language_model\.model\.lm_head\.": "language_model.lm_head.",
}
_TOWER = r"((?:^|\.)vision_tower\.)(embeddings|encoder|post_layernorm|pre_layrnorm|head)\."
_TOWERS = ("clip_vision_model", "siglip_vision_model")  # of models named so on the hub

# Architectures whose models in transformers and in vLLM differ by a field that no scaled-down
# config sets for both.
UNLOADABLE = (
    "AXK1ForCausalLM",
    "CohereCompassForConditionalGeneration",
    "ColModernVBertForRetrieval",
    "ColPaliForRetrieval",
    "Cosmos3EdgeForConditionalGeneration",
    "DbrxForCausalLM",
    "DeepseekV4ForCausalLM",
    "DiffusionGemmaForBlockDiffusion",
    "Granite4VisionForConditionalGeneration",
    "GraniteMoeHybridForCausalLM",
    "GlmOcrForConditionalGeneration",
    "GteModel",
    "HYV4ForCausalLM",
    "InklingForCausalLM",
    "InklingForConditionalGeneration",
    "JambaForSequenceClassification",
    "KimiLinearForCausalLM",
    "LagunaForCausalLM",
    "Lfm2VlForConditionalGeneration",
    "MiMoV2FlashForCausalLM",
    "LongcatFlashForCausalLM",
    "NomicBertModel",
    "OlmoHybridForCausalLM",
    "QianfanOCRForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration",
)


def is_known(architecture: str) -> bool:
    """Whether transformers has a class of that name, with the tensors of vLLM's class."""
    is_draft = architecture in configs.DRAFTS
    return hasattr(transformers, architecture) and not is_draft and architecture not in UNLOADABLE


def tensors(built: Built) -> Tensors:
    """Tensors of a scaled-down model's checkpoint, by name, on the meta device.

    Raises:
        LookupError: transformers has no such architecture, see ``is_known``.
    """
    if not is_known(built.architecture):
        raise LookupError(f"transformers has no {built.architecture} of vLLM's tensors")
    model_class = getattr(transformers, built.architecture)
    # vLLM has put layers of its own into transformers; they ask for vLLM's config.
    with set_current_vllm_config(built.config), of_transformers(), torch.device("meta"):
        config = configs.miniature(built.architecture)
        model = model_class._from_config(config, dtype=built.model_config.dtype)
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    reverted: dict[str, Tensor] = revert_weight_conversion(model, state)
    renamed = dict(_RENAMED)
    if getattr(getattr(config, "vision_config", None), "model_type", "") in _TOWERS:
        renamed[_TOWER] = r"\1vision_model.\2."
    return {_on_disk(name, renamed): tensor for name, tensor in reverted.items()}


def dry_load(built: Built, found: Tensors) -> None:
    """Dry-load tensors with the names, dtypes and shapes of ``found`` into a built model.

    Raises:
        UnsupportedCheckpoint: a tensor is missing, unknown to the model, or of the wrong shape.
    """
    with set_current_vllm_config(built.config):
        load = CompleteLoad(built.model, Checkpoint(built.architecture), has_values=False)
        load(hollow(found))


def _on_disk(name: str, renamed: Mapping[str, str]) -> str:
    for pattern, replacement in renamed.items():
        name = re.sub(pattern, replacement, name)
    return name


def hollow(found: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors like ``found``, but with storage for one element, for a dry load."""
    for name, tensor in found.items():
        # Models read single numbers, so these tensors cannot be on the meta device.
        yield name, torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
