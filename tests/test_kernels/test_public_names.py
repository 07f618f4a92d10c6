"""Public names of the kernels' package: each is found, in any order of imports."""

import ast
import pkgutil
from importlib import import_module
from pathlib import Path

import pytest

import nvfp4_kernels

NAMES = {name: module for module, names in nvfp4_kernels._NAMES.items() for name in names}


def test_type_checkers_are_told_the_same() -> None:
    tree = ast.parse(Path(nvfp4_kernels.__file__).read_text(encoding="utf-8"))
    told: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("nvfp4_"):
            for alias in node.names:
                names = import_module(node.module).__all__ if alias.name == "*" else [alias.name]
                told |= dict.fromkeys(names, node.module)
    assert told == {name: f"nvfp4_kernels.{module}" for name, module in NAMES.items()}
    assert nvfp4_kernels.__all__ == sorted(NAMES)
    assert set(NAMES) <= set(dir(nvfp4_kernels))


def test_an_op_keeps_its_name_beside_a_package_of_that_name() -> None:
    """Python sets a package's attribute when it imports a subpackage of that name."""
    inside = [each.name for each in pkgutil.iter_modules(nvfp4_kernels.__path__)]
    assert set(NAMES) & set(inside)
    for name in inside:
        module = import_module(f"nvfp4_kernels.{name}")
        setattr(nvfp4_kernels, name, module)
        if name not in NAMES:
            assert getattr(nvfp4_kernels, name) is module
    for name, module in NAMES.items():
        home = import_module(f"nvfp4_kernels.{module}")
        assert getattr(nvfp4_kernels, name) is vars(home)[name]


def test_another_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'nvfp4_kernels' has no attribute 'gem'"):
        _ = nvfp4_kernels.gem  # type: ignore[attr-defined]
