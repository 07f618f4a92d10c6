"""Constants of modules: each name is assigned once."""

import ast
from collections import Counter
from pathlib import Path

import pytest

FOLDERS = "kernels/nvfp4_kernels", "vllm_fp4_plugin", "examples", "tests"


def assigned_twice(source: str) -> list[str]:
    """Names to which a module's statements, outside of branches, assign more than once."""
    targets = [
        target
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
    ]
    names = Counter(target.id for target in targets if isinstance(target, ast.Name))
    return [name for name, count in names.items() if count > 1]


def test_a_name_assigned_twice_is_found() -> None:
    assert assigned_twice("A = 1\nB = 2\nA = 1\n") == ["A"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_name_is_assigned_once(folder: str, pytestconfig: pytest.Config) -> None:
    files: list[Path] = sorted((pytestconfig.rootpath / folder).rglob("*.py"))
    assert files
    found = {str(file): assigned_twice(file.read_text(encoding="utf-8")) for file in files}
    assert {file: names for file, names in found.items() if names} == {}
