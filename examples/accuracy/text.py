"""Text that models are measured on, as windows of token ids."""

from pathlib import Path

import numpy as np

from examples.load_tokenizer import load_tokenizer
from examples.perplexity import choose_windows


def read_windows(file: Path, checkpoint: Path, count: int, length: int) -> np.ndarray:
    """``count`` windows of ``length`` ids spread evenly over a text: int64 ``(count, length)``.

    Each window begins with the BOS token, if the checkpoint's tokenizer starts texts with BOS.

    Raises:
        ValueError: the file is not UTF-8 text or is too short, or the tokenizer cannot be loaded.
    """
    tokenizer = load_tokenizer(checkpoint)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text: {file} cannot be read ({error}); give a UTF-8 text") from error
    bos = tokenizer.bos_token_id
    starts = [bos] if tokenizer("a").input_ids[0] == bos else []
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    body = choose_windows(np.array(ids, dtype=np.int64), count, length - len(starts))
    return np.concatenate([np.full((count, len(starts)), bos or 0), body], axis=1)
