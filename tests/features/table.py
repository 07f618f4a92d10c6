"""Table of features, built from the marks of tests."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "examples" / "results" / "features.md"

# Features in the order of the page.
FEATURES = (
    "prefix caching", "chunked prefill", "n > 1", "beam search", "prompt log-probabilities",
    "structured output", "n-gram speculation", "EAGLE", "MTP heads", "draft model", "LoRA",
    "reload of weights", "online update of weights", "sleep and wake", "several engines",
    "embeddings", "classification", "images", "tensor parallelism", "expert parallelism",
    "pipeline parallelism", "data parallelism", "KV connector", "KV offloading",
    "batch invariance", "seeds with chunked prefill",
)  # fmt: skip
OUTCOMES = ("works", "refused", "not in vLLM on a CPU")

INTRODUCTION = """# vLLM's features with `nvfp4-tc`

Each row is the assertion of a marked test: an engine on a CPU with the feature, compared with the
same engine without it, or with the named reference. `python -m tests.features` writes this page
from the marks, and a test compares the two. Nothing here ran on a GPU.

| feature | on a CPU | what the test shows | test |
|---|---|---|---|
"""


class Mark(NamedTuple):
    """Feature mark of a test.

    Attributes:
        feature: one of ``FEATURES``.
        outcome: one of ``OUTCOMES``.
        note: note on the result that the test shows.
        test: file of the test, from ``tests`` on, and its name.
    """

    feature: str
    outcome: str
    note: str
    test: str


def page() -> str:
    """Page of all features.

    Raises:
        ValueError: a mark is wrong, or a feature has no test.
    """
    marks = sorted(all_marks(), key=lambda mark: (FEATURES.index(mark.feature), mark.test))
    missing = set(FEATURES) - {mark.feature for mark in marks}
    if missing:
        raise ValueError(f"features: no test is marked with {sorted(missing)}; mark one, or remove")
    rows = (f"| {m.feature} | {m.outcome} | {m.note} | `{m.test}` |\n" for m in marks)
    return INTRODUCTION + "".join(rows)


def all_marks() -> Iterator[Mark]:
    """Marks of all tests of this package."""
    for file in sorted(TESTS.rglob("test_*.py")):
        text = file.read_text()
        if "mark.feature(" in text:
            yield from marks_in(text, str(file.relative_to(TESTS)))


def marks_in(source: str, file: str) -> Iterator[Mark]:
    """Marks of a file's tests.

    Args:
        source: text of the file.
        file: name of the file.

    Raises:
        ValueError: a mark is not on a test, or its arguments are not literals, or not among
            ``FEATURES`` and ``OUTCOMES``.
    """
    for node in ast.walk(ast.parse(source)):
        for mark in getattr(node, "decorator_list", ()):
            if not ast.unparse(mark).startswith("pytest.mark.feature("):
                continue
            name = getattr(node, "name", "")
            where = f"{file}:{mark.lineno}"
            feature, outcome, note = (ast.literal_eval(each) for each in mark.args)
            if not name.startswith("test_") or feature not in FEATURES or outcome not in OUTCOMES:
                raise ValueError(
                    f"{where}: marks {name} with {feature!r}, {outcome!r}; must mark a test with "
                    f"one of {FEATURES} and one of {OUTCOMES}"
                )
            yield Mark(feature, outcome, note, f"{file.rpartition('/')[2]}::{name}")
