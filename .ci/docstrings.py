"""Check that docstrings begin with a head noun or a verb, not with a preposition or a pronoun."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("kernels/nvfp4_kernels", "vllm_fp4_plugin", "examples", "tests/emulator")
FIRST_WORD = re.compile(r"[\w-]+")
WORDS = """
    Of Over By Until With Without For From In On At To As Like Through Within Under Per
    Before After Between Beyond Behind Beside
    Those That It They Its Their Same Then Here There Nothing Nobody
    How Which Who Whose When While Where What
    And But Also Again Not Only Just Still Straight Left Is Are Was
"""
DENIED = frozenset(WORDS.split())  # "Whether" stays allowed: the usual form for a bool

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def violations(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, name and denied first word of each docstring in ``source`` that has one."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, Documented) or not (text := ast.get_docstring(node)):
            continue
        word = FIRST_WORD.match(text)
        if word and word[0] in DENIED:
            name = "the module" if isinstance(node, ast.Module) else node.name
            yield node.body[0].lineno, name, word[0]


def main() -> int:
    """Print each docstring found; return 1 if there is one, 0 otherwise."""
    found = 0
    for path in (path for checked in CHECKED for path in sorted((ROOT / checked).rglob("*.py"))):
        for line, name, word in sorted(violations(path.read_text(encoding="utf-8"))):
            found += 1
            print(
                f"{path.relative_to(ROOT)}:{line}: docstring of {name} begins with {word!r}; "
                "begin with a head noun or a verb"
            )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
