"""Lanes of the suite: a run leaves thorough tests out if their sources are unchanged.

Thorough tests are those of emulated kernels, of mutants, of random calls, of the time model, of the
emulator itself, and of every architecture of vLLM's registry: their results do not depend on the
machine. ``--lane all`` runs every test and records a digest of the sources of each file whose tests
have passed. ``--lane test`` leaves out the thorough tests of files whose digest equals the recorded
digest: after a change of an op or of the emulator, its thorough tests run again.

The sources of a file are the files that it imports, directly or indirectly, and the modules that
any of these files names in a string, as tables of kernels do.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("passed.json")
LANES = ("all", "test")

PACKAGES = {
    "nvfp4_kernels": ROOT / "kernels" / "nvfp4_kernels",
    "vllm_fp4_plugin": ROOT / "vllm_fp4_plugin",
    "tests": ROOT / "tests",
    "examples": ROOT / "examples",
}
# Common sources of every file: installed packages, and the files that every test runs in.
COMMON = ("pyproject.toml", "tests/conftest.py", "tests/lanes.py")
THOROUGH = re.compile(
    r"tests/(test_emulator/|test_fuzz\.|test_modelled_|.*mutants|.*/chains/"
    r"|.*_sm90\.|.*_sm100\.|.*_emulated\.)"
)
_MODULE = re.compile(rf"({'|'.join(PACKAGES)})((?:\.\w+)+)(?::\w+)?\.?")
_DATA = {".cpp", ".cu", ".json", ".md", ".safetensors", ".txt"}


def is_thorough(item: pytest.Item) -> bool:
    """Whether a test is thorough: skipped while its sources equal the recorded sources."""
    path = item.path.relative_to(ROOT).as_posix()
    emulates = "device_schedule" in getattr(item, "fixturenames", ())
    return bool(THOROUGH.match(path)) or emulates or item.get_closest_marker("thorough") is not None


def is_unchanged(path: Path) -> bool:
    """Whether the sources of a test file are those recorded when all tests passed."""
    return _recorded().get(path.relative_to(ROOT).as_posix()) == digest(path)


def record(paths: Iterable[Path]) -> None:
    """Record the sources of test files, all of which have passed."""
    found = {path.relative_to(ROOT).as_posix(): digest(path) for path in sorted(set(paths))}
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


@cache
def digest(path: Path) -> str:
    """Digest of a file and of its sources."""
    found = hashlib.sha256()
    for file in sorted({*sources(path), *(ROOT / name for name in COMMON)}):
        found.update(f"{file.relative_to(ROOT).as_posix()} {_content(file)}\0".encode())
    return found.hexdigest()[:16]


def sources(path: Path) -> set[Path]:
    """Files that a file depends on, including itself and data files in the same folders."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file not in seen:
            seen.add(file)
            waiting += _named_in(file)
    beside = (other for folder in {file.parent for file in seen} for other in folder.iterdir())
    return seen | {other for other in beside if other.suffix in _DATA and other != RECORD}


@cache
def _content(file: Path) -> str:
    """Digest of a file; of a module without its docstrings and comments."""
    content = file.read_bytes()
    if file.suffix == ".py":
        content = ast.dump(_without_docstrings(ast.parse(content))).encode()
    return hashlib.sha256(content).hexdigest()


def _without_docstrings(module: ast.Module) -> ast.Module:
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(ast.Constant(str())), *rest]:
                    node.body = rest
    return module


@cache
def _named_in(file: Path) -> frozenset[Path]:
    """Files of the modules that a file imports or names in a string."""
    if file.suffix != ".py":
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found: set[Path] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found |= _imported(node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found |= _imported(alias.name, "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = _MODULE.fullmatch(node.value)
            if match:
                found |= set(_files(match[1] + match[2], whole=True))
    return frozenset(found)


def _imported(module: str, name: str) -> set[Path]:
    """Files of an imported name: those of the module with that name, or of the defining module."""
    if module.partition(".")[0] not in PACKAGES:
        return set()
    found = set(_files(f"{module}.{name}"))
    if not found and module in PACKAGES:  # a package's face names all that it has
        return set(_files(_exports(module).get(name, module)))
    return found or set(_files(module))


@cache
def _exports(package: str) -> dict[str, str]:
    """Module of each name that a package's ``__init__.py`` imports, also for type checkers only."""
    found: dict[str, str] = {}
    for file in _files(package):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    stars = _exports(node.module) if alias.name == "*" else {}
                    found |= stars or {alias.name: node.module}
    return found


def _files(module: str, whole: bool = False) -> Iterator[Path]:
    """File of a module; ``whole``: every file of a package."""
    prefix, _, rest = module.partition(".")
    if prefix not in PACKAGES:
        return
    path = PACKAGES[prefix].joinpath(*filter(None, rest.split(".")))
    if path.with_suffix(".py").is_file():
        yield path.with_suffix(".py")
    elif path.is_dir() and whole:
        yield from path.rglob("*.py")
    elif (path / "__init__.py").is_file():
        yield path / "__init__.py"


@cache
def _recorded() -> dict[str, str]:
    if not RECORD.exists():
        return {}
    found: dict[str, str] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found
