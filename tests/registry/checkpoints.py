"""Checkpoints of miniatures by name, dtype and shape, as transformers would write them."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from tests.catalogue.hub_classes import of_transformers
from tests.registry import configs

Tensors = Mapping[str, Tensor]


def tensors(architecture: str, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Tensors of a miniature's checkpoint, by name, on the meta device.

    Raises:
        LookupError: transformers has no class of the architecture's name.
    """
    model_class = getattr(transformers, architecture, None)
    if model_class is None or architecture in configs.DRAFTS:
        raise LookupError(f"transformers has no {architecture}")
    with of_transformers(), torch.device("meta"):
        config = configs.miniature(architecture)
        model = model_class._from_config(config, dtype=dtype)
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    reverted: dict[str, Tensor] = revert_weight_conversion(model, state)
    return reverted


def hollow(found: Tensors) -> Any:
    """Pairs of name and tensor for a model's ``load_weights``; they take no memory."""
    for name, tensor in found.items():
        # Models look at single numbers, which a tensor on the meta device has not.
        yield name, torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
