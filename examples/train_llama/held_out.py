"""Quality of a checkpoint's predictions on held-out text."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from examples.log_probabilities import log_probabilities, of_next_tokens
from examples.perplexity import choose_windows, perplexity

WINDOWS = 128
WINDOWS_AT_ONCE = 8


def held_out_perplexity(
    checkpoint: Path, tokens: np.ndarray, length: int, device: str
) -> tuple[float, int]:
    """Perplexity of a checkpoint in its stored dtype.

    Args:
        checkpoint: folder to load from.
        tokens: held-out ids, ``(tokens,)``.
        length: number of tokens in a window; up to ``WINDOWS`` windows are spread over the text.
        device: device of the model.

    Returns:
        The perplexity, and the number of tokens it is measured on.

    Raises:
        ValueError: there is less than one window.
    """
    count = min(WINDOWS, len(tokens) // length)
    if not count:
        raise ValueError(
            f"root: its held-out files have {len(tokens)} tokens, one window takes {length}; "
            "point it at more Python sources"
        )
    windows = choose_windows(tokens, count, length).astype(np.int64)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").to(device).eval()
    found = [
        of_next_tokens(log_probabilities(model, batch), batch)
        for batch in torch.from_numpy(windows).to(device).split(WINDOWS_AT_ONCE)
    ]
    logprobs = np.concatenate(found)
    return perplexity(logprobs), logprobs.size
