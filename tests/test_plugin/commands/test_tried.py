"""Version combinations that were tried: in messages, in the documents, and as installed here."""

from dataclasses import replace
from pathlib import Path

import pytest

from vllm_fp4_plugin.commands import tried
from vllm_fp4_plugin.commands.tried import COMBINATIONS, Combination

PAGE = Path(__file__).parents[3] / "docs" / "versions.md"
FIRST = COMBINATIONS[0]


def test_the_page_has_the_table() -> None:
    assert tried.table() in PAGE.read_text(encoding="utf-8"), (
        "python -m vllm_fp4_plugin.commands.tried"
    )


def test_what_is_installed() -> None:
    """The installed versions must have a row: add one for every new release."""
    here = tried.here()
    versions = [replace(each, tried="", python=here.python) for each in COMBINATIONS]
    assert here in versions


def test_a_combination_that_was_tried() -> None:
    assert tried.verdict(replace(FIRST, tried="")) == "these versions together: all tests"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"torch": "2.15.0"}, "torch 2.13.0"),
        ({"vllm": "0.34.0"}, "vLLM 0.32.0"),
        ({"python": "3.15", "cute_dsl": "not installed"}, "CuTe DSL 4.8.0, Python 3.11"),
    ],
)
def test_a_combination_that_was_not(changed: dict[str, str], told: str) -> None:
    found: Combination = replace(FIRST, **changed)
    assert tried.verdict(found) == (
        f"these versions together: not tried; nearest tried (all tests): {told}"
    )
