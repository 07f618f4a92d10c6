"""Task: choose the code that a docstring belongs to; multiple choice without cues.

Four texts and the continuation of each make four questions with the same four choices. The model is
asked for the text after which the answer is likeliest: the likelihood and length of an answer alone
do not matter, and a model that ignores the answer is right exactly once in four times.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from examples.accuracy.tasks.text import (
    ANSWER_BYTES,
    CONTEXT_BYTES,
    HeldOut,
    definitions,
    one_line,
    scattered,
)

CHOICES = 4
LEAST_BYTES = 25  # per answer
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


@dataclass(frozen=True)
class Pair:
    """Text and its continuation, the answer; from the definition ``name`` in the file ``path``."""

    path: str
    name: str
    context: str
    answer: str


def first_lines(text: HeldOut) -> list[Pair]:
    """The first line of each docstring, and the preceding code."""
    return [
        Pair(found.path, found.name, found.opening, one_line(found.docstring.split("\n")[0]))
        for document in text.documents
        for found in definitions(document)
    ]


def endings(text: HeldOut) -> list[Pair]:
    """The last sentence of each docstring of several sentences, and all preceding text."""
    pairs = []
    for found in (f for document in text.documents for f in definitions(document)):
        *before, last = _SENTENCE_END.split(found.docstring)
        if before and last.endswith(".") and "\n\n" not in last:
            beginning = found.docstring.removesuffix(last).rstrip()
            context = found.opening + indent(beginning, "    ").lstrip()
            pairs.append(Pair(found.path, found.name, context, one_line(last)))
    return pairs


def questions(pairs: Iterable[Pair], text: HeldOut, count: int) -> list[dict[str, Any]]:
    """Documents for the harness, at most ``count``, in whole groups of four questions.

    Left out are answers that occur word for word in a training file, repeated answers and contexts,
    and pairs whose answer or context is too long or whose answer is too short. The answers of a
    group have similar lengths, and come from different files and from definitions of different
    names.
    """
    fitting = [
        pair
        for pair in _without_repeats(pairs)
        if LEAST_BYTES <= len(pair.answer.encode()) <= ANSWER_BYTES
        and len(pair.context.encode()) <= CONTEXT_BYTES
    ]
    new = text.new(pair.answer for pair in fitting)
    usable = [pair for pair in fitting if pair.answer in new]
    groups = sorted(_groups(usable), key=lambda group: scattered(*(p.answer for p in group)))
    return [
        {
            "choices": [other.context for other in group],
            "answer": pair.answer,
            "gold": place,
            "path": pair.path,
        }
        for group in groups[: count // CHOICES]
        for place, pair in enumerate(group)
    ]


def _without_repeats(pairs: Iterable[Pair]) -> list[Pair]:
    answers: dict[str, Pair] = {}
    contexts: dict[str, Pair] = {}
    for pair in pairs:
        answers.setdefault(pair.answer.lower(), pair)
    for pair in answers.values():
        contexts.setdefault(pair.context, pair)
    return list(contexts.values())


def _groups(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Group pairs by four, with answers of similar length.

    A pair of a file or definition name that the group already has is deferred to the next group;
    pairs left at the end are dropped.
    """
    waiting = sorted(pairs, key=lambda pair: (len(pair.answer), scattered(pair.answer)))
    groups = []
    while waiting:
        group: list[Pair] = []
        for pair in waiting:
            if len(group) < CHOICES and not any(
                pair.path == other.path or pair.name == other.name for other in group
            ):
                group.append(pair)
        if len(group) < CHOICES:
            break
        waiting = [pair for pair in waiting if pair not in group]
        groups.append(sorted(group, key=lambda pair: scattered(pair.answer)))
    return groups
