"""Tasks for lm-evaluation-harness, made without downloads from the machine's Python sources."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from examples.accuracy.tasks import docstrings, words
from examples.accuracy.tasks.text import HeldOut, read_held_out
from examples.demo.corpus import STANDARD_LIBRARY

DOCUMENTS = 200  # per task, at most

_MAKERS: dict[str, Callable[[HeldOut, int], list[dict[str, Any]]]] = {
    "docstring_match": lambda text, count: docstrings.questions(
        docstrings.first_lines(text), text, count
    ),
    "docstring_ending": lambda text, count: docstrings.questions(
        docstrings.endings(text), text, count
    ),
    "next_word": words.questions,
}
NAMES = tuple(_MAKERS)


def make_tasks(
    folder: Path, roots: Sequence[Path] = (STANDARD_LIBRARY,), count: int = DOCUMENTS
) -> dict[str, int]:
    """Write ``NAME.yaml`` and ``NAME.jsonl`` of every task; equal sources give equal tasks.

    Args:
        folder: folder, created if missing; the tasks hold its path, so make new tasks instead of
            moving the folder.
        roots: folders of Python sources. Only files held out from training are used; name all
            folders that a model was trained on.
        count: number of documents of each task, fewer if the text is too short.

    Returns:
        Number of documents by the name of the task.

    Raises:
        ValueError: a root is not a folder, the roots together have no training or no held-out
            files, or some task has no document.
    """
    made = _documents(tuple(roots), count)
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in made.items():
        data = folder.resolve() / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        task = Template(Path(__file__).with_name(f"{name}.yaml").read_text())
        # A JSON string is a YAML string too.
        (folder / f"{name}.yaml").write_text(task.substitute(data=json.dumps(str(data))))
    return {name: len(documents) for name, documents in made.items()}


@cache  # computed once for all measured variants
def _documents(roots: tuple[Path, ...], count: int) -> dict[str, list[dict[str, Any]]]:
    text = read_held_out(roots)
    made = {name: make(text, count) for name, make in _MAKERS.items()}
    for name, documents in made.items():
        if not documents:
            raise ValueError(
                f"{name}: {len(text.documents)} held-out files give no documents, must be at "
                f"least {docstrings.CHOICES}; give more text with --root, and more --documents"
            )
    return made
