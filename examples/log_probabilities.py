"""Log-probabilities of text under a causal model of transformers."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


@torch.no_grad()
def log_probabilities(model: Any, windows: Tensor) -> Tensor:
    """Natural log-probabilities of all vocabulary tokens at each position but the last.

    Args:
        model: model on the device of ``windows``.
        windows: int64 ``(windows, tokens)``.

    Returns:
        float32 ``(windows, tokens - 1, vocabulary)``.
    """
    return model(input_ids=windows[:, :-1], use_cache=False).logits.float().log_softmax(-1)


def of_next_tokens(logprobs: Tensor, windows: Tensor) -> np.ndarray:
    """Log-probabilities of the actual next tokens: float64 ``(windows, tokens - 1)``."""
    return logprobs.gather(-1, windows[:, 1:, None]).squeeze(-1).double().cpu().numpy()
