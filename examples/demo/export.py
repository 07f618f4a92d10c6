"""Export of the trained model as a checkpoint that vLLM and transformers load unchanged."""

from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from examples.demo.train import DecoderModel


def save_checkpoint(model: DecoderModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model, generation settings and tokenizer into ``folder``.

    ``model`` itself is converted to BF16.
    """
    disable_progress_bar()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
