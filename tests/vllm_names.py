"""Names that the plugin uses from vLLM."""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import vllm_fp4_plugin

ROOT = Path(vllm_fp4_plugin.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
PACKAGE = "vllm"


def names_in(source: str) -> Iterator[tuple[str, str]]:
    """Pairs of a vLLM module and a name that ``source`` uses from it, by import or attribute."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            assert node.module is not None
            for alias in node.names:
                yield node.module, alias.name
                if is_module(f"{node.module}.{alias.name}"):
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            assert not any(a.name.split(".")[0] == PACKAGE for a in node.names), "import by name"
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
        ):
            yield modules[node.value.id], node.attr


def used() -> set[tuple[str, str]]:
    """All pairs of module and name that the plugin uses, see ``names_in``."""
    return {name for file in SOURCES for name in names_in(file.read_text("utf-8"))}


@cache
def is_module(name: str) -> bool:
    """Whether the installed vLLM has a module of this name."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
