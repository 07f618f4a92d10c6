"""The tokenizer: round trips, special tokens, the saved form."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from examples.demo.tokenizer import BOS, EOS, PAD, encode_documents, train_tokenizer

TEXTS = ["def add(left, right):\n    return left + right\n" * 5, "The sum of two numbers.\n" * 5]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocabulary=290, max_length=64)


@given(text=st.text().filter(lambda text: not any(s in text for s in (BOS, EOS, PAD))))
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("text", ["a  b\t\r\n  c .", "naïve 漢字 🎉", "x's n't", "\x00\x7f"])
def test_awkward_texts_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_merges_are_learnt_and_vocabulary_is_kept(tokenizer):
    assert len(tokenizer) == 290
    assert len(tokenizer(TEXTS[0]).input_ids) < len(TEXTS[0]) / 2


def test_texts_begin_with_bos_and_documents_end_with_eos(tokenizer):
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    stream = encode_documents(tokenizer, ["a", "def"])
    assert stream.dtype == np.uint16
    assert tokenizer.decode(stream) == f"{BOS}a{EOS}{BOS}def{EOS}"


def test_saved_form_loads_with_chat_template(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(TEXTS[0]).input_ids == tokenizer(TEXTS[0]).input_ids
    assert (loaded.bos_token, loaded.eos_token, loaded.model_max_length) == (BOS, EOS, 64)
    chat = [{"role": "user", "content": "Hello"}]
    rendered = loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "# user:\nHello\n\n# assistant:\n"
