"""Text from which tasks are made: only held-out files, because models train on all other files."""

import ast
import io
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from textwrap import dedent

from examples.demo.corpus import Document, read_corpus

# A token stands for one byte or more: a prompt of so many bytes and its continuation fit the 1024
# tokens of the demo's model, with any tokenizer.
CONTEXT_BYTES = 800
ANSWER_BYTES = 160

_START = 3  # words of an answer's lookup key
_QUOTES = re.compile(r'[ \t]+"""(?=[A-Z])')


@dataclass(frozen=True)
class HeldOut:
    """Text from which tasks may be made.

    Attributes:
        documents: held-out files, sorted by path; no training file has the same text.
        train: texts of the training files.
    """

    documents: tuple[Document, ...]
    train: tuple[str, ...]

    def new(self, answers: Iterable[str]) -> set[str]:
        """Answers of three or more words whose word sequence occurs in no training file."""
        by_start: dict[tuple[str, ...], dict[str, list[str]]] = {}
        for answer in answers:
            if len(words := _words(answer)) >= _START:
                by_start.setdefault(tuple(words[:_START]), {})[answer] = words
        for text in self.train:
            words = _words(text)
            for place, start in enumerate(zip(words, words[1:], words[2:], strict=False)):
                same_start = by_start.get(start, {})
                for answer, own in list(same_start.items()):
                    if words[place : place + len(own)] == own:
                        del same_start[answer]
        return {answer for same_start in by_start.values() for answer in same_start}


@dataclass(frozen=True)
class Definition:
    """A function or class that begins with a docstring.

    Attributes:
        path: path of the source file.
        name: name of the function or class.
        opening: source up to and including the docstring's opening quotes, dedented.
        docstring: text as ``help()`` shows it.
    """

    path: str
    name: str
    opening: str
    docstring: str


def read_held_out(roots: Sequence[Path]) -> HeldOut:
    """Files under folders of Python sources, split as the models' training splits them.

    Raises:
        ValueError: a root is not a folder, or the roots have no training or no held-out files.
    """
    corpus = read_corpus(roots)
    return HeldOut(corpus.held_out, tuple(document.text for document in corpus.train))


def definitions(document: Document) -> Iterator[Definition]:
    """Functions and classes of a file whose docstring begins with a capital letter.

    The docstring must stand in three double quotes, without a prefix.
    """
    lines = list(io.StringIO(document.text))
    for node in ast.walk(_parse(document)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        docstring = ast.get_docstring(node)
        opening = lines[node.lineno - 1 : node.body[0].lineno]
        quotes = _QUOTES.match(opening[-1])
        if docstring and quotes:
            opening[-1] = quotes[0]
            yield Definition(document.path, node.name, dedent("".join(opening)), docstring)


def one_line(text: str) -> str:
    """``text`` with each run of white space replaced by one space."""
    return " ".join(text.split())


def scattered(*key: str) -> bytes:
    """Pseudo-random sort key that spreads the entries of a file, identical on every machine."""
    return sha256("\0".join(key).encode()).digest()


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _parse(document: Document) -> ast.Module:
    """Syntax tree; empty if the text is not valid for this Python version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            return ast.parse(document.text)
        except (SyntaxError, ValueError):
            return ast.Module([], [])
