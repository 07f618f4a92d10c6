"""Loading of a checkpoint's tokenizer."""

from pathlib import Path
from typing import Any


def load_tokenizer(checkpoint: Path) -> Any:
    """Load a checkpoint's tokenizer.

    Raises:
        ValueError: the checkpoint has no tokenizer that transformers can load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    except Exception as error:  # a damaged file raises a bare Exception
        raise ValueError(
            f"model: {checkpoint} holds no tokenizer that transformers can load ({error}); add "
            "its files"
        ) from error
