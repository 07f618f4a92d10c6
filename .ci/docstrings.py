"""Check docstrings: a head noun or a verb first, and nouns where free relatives would stand."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("kernels/nvfp4_kernels", "vllm_fp4_plugin", "examples", "tests", ".ci")
FIRST_WORD = re.compile(r"[\w-]+")
WORDS = """
    Of Over By Until With Without For From In On At To As Like Through Within Under Per
    Before After Between Beyond Behind Beside
    Those That It They Its Their Same Then Here There Nothing Nobody
    How Which Who Whose When While Where What
    And But Also Again Not Only Just Still Straight Left Is Are Was
"""
DENIED = frozenset(WORDS.split())  # "Whether" stays allowed: the usual form for a bool
# "what it holds" says less than "the tensors it holds"; "what is …" and "what if" are left alone.
VAGUE = re.compile(r"\bwhat (?!is\b|if\b)[\w`]+|\bone that there is not\b|\bof those\b")
# Words with a plainer or more exact one: "beside" is near, compared with, or in addition to.
PLAINER = {"beside": "next to, with, compared with or in addition to", "under way": "in flight"}
DATED = re.compile(r"\b(?:" + "|".join(PLAINER) + r")\b")
# "Rows of a tile." names things, but an int is returned: "Number of rows per tile."
COUNTED = """
    Atoms Blocks Boxes Chunks Columns CTAs Elements Entries Experts Groups Heads Iterations Keys
    Lanes MMAs Pages Queries Registers Rows Slots SMs Stages Steps Threads Tiles Tokens Units
    Vectors Warps Weights Words Data Scales
"""
COUNTS = frozenset(COUNTED.split())

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def violations(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and fault of the docstrings in ``source``."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, Documented) or not (text := ast.get_docstring(node)):
            continue
        name = "the module" if isinstance(node, ast.Module) else node.name
        line = node.body[0].lineno
        word = FIRST_WORD.match(text)
        if word and word[0] in DENIED:
            yield line, f"of {name} begins with {word[0]!r}; begin with a head noun or a verb"
        if word and word[0] in COUNTS and _returns_int(node):
            yield line, f"of {name} begins with {word[0]!r}; say 'Number of' or 'Bytes of'"
        for vague in VAGUE.findall(text):
            yield line, f"of {name} says {vague!r}; name the thing by a noun"
        for dated in DATED.findall(text):
            yield line, f"of {name} says {dated!r}; say {PLAINER[dated]}"


def _returns_int(node: Documented) -> bool:
    """Whether ``node`` is a function annotated to return an integer, on the host or a device."""
    if isinstance(node, ast.FunctionDef) and isinstance(node.returns, ast.Name):
        return node.returns.id in {"int", "Int32", "Int64"}
    return False


def main() -> int:
    """Print each fault found; return 1 if there is one, 0 otherwise."""
    found = 0
    for path in (path for checked in CHECKED for path in sorted((ROOT / checked).rglob("*.py"))):
        for line, fault in sorted(violations(path.read_text(encoding="utf-8"))):
            found += 1
            print(f"{path.relative_to(ROOT)}:{line}: docstring {fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
