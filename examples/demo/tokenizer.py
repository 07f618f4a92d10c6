"""Byte-level BPE tokenizer trained on the corpus: any text round-trips, nothing is downloaded."""

from collections.abc import Iterable, Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 10_240  # `vllm bench` draws token ids below 10,000
DOCUMENTS_AT_ONCE = 1024
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '# ' + message['role'] + ':\\n' + message['content'] + '\\n\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '# assistant:\\n' }}{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], vocabulary: int = VOCABULARY, max_length: int = 1024
) -> PreTrainedTokenizerFast:
    """Learn merges from ``texts``.

    Args:
        texts: training texts.
        vocabulary: target number of ids, special tokens and bytes included; short texts give fewer.
        max_length: context length in tokens, written to the tokenizer's configuration.

    Returns:
        A tokenizer that puts BOS before every text.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[BOS, EOS, PAD],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def encode_documents(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> np.ndarray:
    """One stream of ids, uint16 ``(tokens,)``: BOS text EOS, one document after another."""
    eos = tokenizer.eos_token_id
    encode = tokenizer.backend_tokenizer.encode_batch_fast  # in chunks: encodings are large
    return np.concatenate(
        [
            np.array([*encoding.ids, eos], dtype=np.uint16)
            for first in range(0, len(texts), DOCUMENTS_AT_ONCE)
            for encoding in encode(list(texts[first : first + DOCUMENTS_AT_ONCE]))
        ]
    )
