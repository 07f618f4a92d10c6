"""Token sequences from a text file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from vllm_fp4_plugin.quantizer.errors import QuantizerError

_PIECE_CHARACTERS = 1 << 20  # characters per tokenizer call, which takes some 100 bytes for each
_LINE_CHARACTERS = 1 << 24  # characters of a .jsonl line, which is read whole


def read_sequences(file: Path, tokenizer: Any, tokens: int, seq_len: int) -> Tensor:
    """Read the first ``tokens // seq_len`` sequences of a text, or fewer if the text is shorter.

    Args:
        file: UTF-8 text, or ``.jsonl`` with a string ``text`` in every line.
        tokenizer: tokenizer of the model. If this puts BOS before a text, every sequence starts
            with BOS.
        tokens: maximum number of tokens in all sequences; at least ``seq_len``.
        seq_len: number of tokens in a sequence, BOS included; at least 2.

    Returns:
        int64 ``(sequences, seq_len)``, without padding.

    Raises:
        QuantizerError: the file is missing, not UTF-8 or not as described; or it holds NUL
            characters, a .jsonl line of more than 16 Mi characters, or less than one sequence.
    """
    starts_with_bos = tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    bos = [tokenizer.bos_token_id] if starts_with_bos else []
    body = seq_len - len(bos)
    wanted = tokens // seq_len * body
    ids: list[int] = []
    for text in _texts(file):
        if "\0" in text:
            raise QuantizerError(
                f"calibrate: {file} holds NUL characters, must be text; give what users write"
            )
        ids += tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if len(ids) >= wanted:
            break
    sequences = min(wanted, len(ids)) // body
    if not sequences:
        raise QuantizerError(
            f"calibrate: {file} has {len(ids)} tokens, one sequence takes {body}; give more text "
            "or lower --seq-len"
        )
    rows = torch.tensor(ids[: sequences * body]).view(sequences, body)
    return torch.cat([torch.tensor(bos, dtype=rows.dtype).expand(sequences, -1), rows], dim=1)


def _texts(file: Path) -> Iterator[str]:
    if not file.is_file():
        raise QuantizerError(f"calibrate: {file} is not a file; give a text or .jsonl file")
    try:
        with file.open(encoding="utf-8") as stream:
            if file.suffix == ".jsonl":
                for number, line in enumerate(_lines(file, stream), 1):
                    text = _text_of_line(file, number, line)
                    for start in range(0, len(text), _PIECE_CHARACTERS):
                        yield text[start : start + _PIECE_CHARACTERS]
            else:
                while piece := stream.read(_PIECE_CHARACTERS):
                    yield piece
    except UnicodeDecodeError as error:
        raise QuantizerError(f"calibrate: {file} is not UTF-8 ({error}); convert it") from error


def _lines(file: Path, stream: TextIO) -> Iterator[str]:
    number = 0
    while line := stream.readline(_LINE_CHARACTERS + 1):
        number += 1
        if len(line) > _LINE_CHARACTERS:
            raise QuantizerError(
                f"calibrate: line {number} of {file} has more than {_LINE_CHARACTERS:,} "
                "characters; divide its text among several lines, or give it as a text file"
            )
        yield line


def _text_of_line(file: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise QuantizerError(
            f'calibrate: line {number} of {file} is not an object with a string "text"; mend it'
        )
    return text
