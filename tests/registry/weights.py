"""Random weights for a built scaled-down model, loaded as by vLLM's ``--load-format dummy``."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.registry.session import Built

# Architectures whose weights vLLM cannot prepare on a CPU as ``load`` leaves them.
UNPREPARED = {
    "DeepseekV4ForCausalLM": "vLLM's attention takes layers without quantization alone",
    "InternLM2ForRewardModel": "vLLM leaves a layer on the meta device",
    "JinaEmbeddingsV5Model": "vLLM leaves a layer on the meta device",
}
GAIN = 2.0  # of each projection; logits of attention differ by several units then


def load(built: Built, seed: int = 0) -> None:
    """Fill a model on CPU with random weights, and make its layers quantise and prepare them.

    The same seed gives the same weights to models of one architecture, whichever ops are fused.

    Args:
        built: model on CPU that ``Session.build`` built with ``load_format="dummy"``.
        seed: seed of the random numbers.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    generator = torch.Generator().manual_seed(seed)

    def fill(tensor: Tensor, **_: Any) -> None:
        if tensor.is_floating_point() and tensor.device.type != "meta":
            _fill(tensor, generator)

    model_config = built.model_config
    loader = dummy_loader.DummyModelLoader(built.config.load_config)
    with (
        set_current_vllm_config(built.config),
        set_default_torch_dtype(model_config.dtype),
        patch.object(dummy_loader, "initialize_single_dummy_weight", fill),
        torch.no_grad(),
    ):
        loader.load_weights(built.model, model_config)
        process_weights_after_loading(built.model, model_config, torch.device("cpu"))


def _fill(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill a matrix that scales its input by ``GAIN``, or a vector of values around one."""
    values = torch.empty(tensor.shape, dtype=torch.float32)
    if tensor.ndim < 2:
        values.uniform_(0.5, 1.5, generator=generator)
    else:
        values.normal_(0.0, GAIN / tensor.shape[-1] ** 0.5, generator=generator)
    tensor.copy_(values)
