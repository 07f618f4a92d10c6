"""Task: predict the next word of code, by greedy decoding; the prompt already has the word."""

import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator

from examples.accuracy.tasks.text import CONTEXT_BYTES, HeldOut, scattered
from examples.demo.corpus import Document

EARLIER_USES = 2
LONGEST = 20  # characters of a word
# A constant answer is right about once in so many times.
ONCE_IN = 50


def questions(text: HeldOut, count: int) -> list[dict[str, str]]:
    """Documents for the harness, at most ``count``.

    A word is the answer at most once per file, and in at most about 1 of ``ONCE_IN`` documents.
    """
    places = (place for document in text.documents for place in _places(document))
    seen: set[tuple[str, str]] = set()
    words: Counter[str] = Counter()
    chosen: list[dict[str, str]] = []
    for place in sorted(places, key=lambda place: scattered(place["path"], place["context"])):
        word = place["word"]
        if (place["path"], word) in seen or words[word] > len(chosen) // ONCE_IN:
            continue
        seen.add((place["path"], word))
        words[word] += 1
        chosen.append(place)
        if len(chosen) == count:
            break
    return chosen


def _places(document: Document) -> Iterator[dict[str, str]]:
    """Candidates: words after a single space, with two or more earlier uses in the prompt."""
    lines = list(io.StringIO(document.text))
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for token in _tokens(document.text):
        word, (row, column) = token.string, token.start
        if token.type != tokenize.NAME or not 2 <= len(word) <= LONGEST:
            continue
        # Tokenizers join the space to the word: no prompt may end in one.
        if not re.search(r"\S $", lines[row - 1][:column]):
            continue
        context = _tail(document.text[: starts[row - 1] + column - 1])
        if len(re.findall(rf"\b{re.escape(word)}\b", context)) >= EARLIER_USES:
            yield {"context": context, "word": word, "path": document.path}


def _tokens(source: str) -> list[tokenize.TokenInfo]:
    """Tokens of a file; empty if the file is not valid for this Python version."""
    try:
        return list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return []


def _tail(text: str) -> str:
    """Last whole lines of ``text`` that fit into a prompt."""
    encoded = text.encode()
    if len(encoded) <= CONTEXT_BYTES:
        return text
    tail = encoded[-CONTEXT_BYTES:].decode(errors="ignore")
    return tail[tail.find("\n") + 1 :]
