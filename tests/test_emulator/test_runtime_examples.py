"""Table of NVIDIA's examples, and its list of cases."""

from pathlib import Path

import pytest
import typer

from tests.emulator.examples.cases import CASES, EXCLUDED, unlisted
from tests.emulator.examples.run import PAGE, Outcome, _row, update

HEADER = "| example | arguments | schedules passed | result | findings | seconds per schedule |"
FIRST, SECOND = CASES[0].name, CASES[1].name


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_page_has_a_row_for_every_case() -> None:
    rows = [line.split(" | ")[:2] for line in PAGE.read_text().splitlines() if line[:2] == "| "]
    shown = [(name.removeprefix("| "), arguments) for name, arguments in rows[2:]]
    assert shown == [(case.name, f"`{case.arguments}`") for case in CASES]


def test_a_row_groups_the_schedules_that_fail_alike() -> None:
    outcomes = [
        Outcome("eager", "pass", 1.0, ["DataRace"]),
        Outcome("late", "a | b", 2.0),
        Outcome("random", "a | b", 3.04, ["DataRace", "UnwaitedLoad"]),
    ]
    row = f"| {FIRST} | `{CASES[0].arguments}` | 1/3 | late, random: a   b | "
    assert _row(CASES[0], outcomes) == row + "DataRace, UnwaitedLoad | 1.0/2.0/3.0 |"


def test_rows_find_their_place_in_the_table(tmp_path: Path) -> None:
    file = tmp_path / "EXAMPLES.md"
    before = ["# Title", "", HEADER, "| --- |", f"| {SECOND} | old |", f"| {SECOND} | twice |"]
    file.write_text("\n".join([*before, "| gone | old |", "", "The end."]) + "\n")
    update(file, {FIRST: f"| {FIRST} | new |"})
    rows = [f"| {FIRST} | new |", f"| {SECOND} | twice |"]
    assert file.read_text().splitlines() == [*before[:4], *rows, "", "The end."]


def test_a_file_without_the_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "EXAMPLES.md"
    file.write_text("# Title\n")
    with pytest.raises(typer.BadParameter, match="has no table"):
        update(file, {})
    assert file.read_text() == "# Title\n"


def test_examples_that_are_forgotten_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "examples/python/CuTeDSL"
    excluded = next(pattern for pattern in EXCLUDED if "*" not in pattern)
    for path in (CASES[0].path, excluded, "cute/blackwell/another.py"):
        script = folder / path
        script.parent.mkdir(parents=True, exist_ok=True)
        script.touch()
    assert unlisted(tmp_path) == ["cute/blackwell/another.py"]
