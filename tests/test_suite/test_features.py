"""Page of features, which agrees with the marks of the tests."""

import pytest

from tests.features import table


def test_the_page_is_what_tests_say() -> None:
    assert table.PAGE.read_text() == table.page(), "python -m tests.features writes it anew"


@pytest.mark.parametrize(
    "marked",
    [
        '"LoRA", "works", "so"\ndef helper(): ...',
        '"a feature", "works", "so"\ndef test_it(): ...',
        '"LoRA", "perhaps", "so"\ndef test_it(): ...',
    ],
    ids=["no test", "unknown feature", "unknown outcome"],
)
def test_wrong_marks_are_refused(marked: str) -> None:
    arguments, _, function = marked.partition("\n")
    source = f"@pytest.mark.feature({arguments})\n{function}\n"
    with pytest.raises(ValueError, match=r"test_file\.py:1: marks"):
        list(table.marks_in(source, "test_file.py"))


def test_marks_are_read() -> None:
    source = '@pytest.mark.feature("LoRA", "works", "so")\ndef test_it(): ...\n'
    assert list(table.marks_in(source, "a/test_b.py")) == [
        table.Mark("LoRA", "works", "so", "test_b.py::test_it")
    ]


def test_features_without_tests_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "all_marks", lambda: iter(()))
    with pytest.raises(ValueError, match="no test is marked with"):
        table.page()
