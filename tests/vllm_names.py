"""Names of vLLM that the plugin uses, and those of them that another release's wheel has.

    python -m tests.vllm_names vllm-0.33.0-….whl

writes what the wheel has of the names used today to ``tests/test_plugin/vllm_names_0.33.json``,
with the parameters of functions, so that a test can hold the plugin against a release that is not
installed. Nothing of the wheel is run.
"""

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import vllm_fp4_plugin

ROOT = Path(vllm_fp4_plugin.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
RECORDED = Path(__file__).parent / "test_plugin"
PACKAGE = "vllm"


def names_in(source: str) -> Iterator[tuple[str, str]]:
    """Modules of vLLM and what a source takes of them: by import, or as a module's attribute."""
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


def used() -> list[tuple[str, str]]:
    """All names that the plugin uses, sorted."""
    return sorted({name for file in SOURCES for name in names_in(file.read_text("utf-8"))})


@cache
def is_module(name: str) -> bool:
    """Whether the installed vLLM has a module of that name."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class Wheel:
    """Sources of a wheel, read but never run."""

    def __init__(self, file: Path) -> None:
        with zipfile.ZipFile(file) as archive:
            self._sources = {
                name: archive.read(name).decode()
                for name in archive.namelist()
                if name.startswith(f"{PACKAGE}/") and name.endswith(".py")
            }
        self.version = file.name.split("-")[1]

    def find(self, module: str, name: str, asked: frozenset[str] = frozenset()) -> list[str] | None:
        """Parameters of a function; [] of anything else; None if the wheel has no such name.

        ``asked``: modules that were looked into on the way here, which may import one another.
        """
        path = self._path(module)
        if path is None or path in asked:
            return None
        asked |= {path}
        for node in ast.walk(ast.parse(self._sources[path])):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return parameters(node)
            if isinstance(node, ast.ClassDef) and node.name == name:
                return []
            if isinstance(node, ast.ImportFrom):
                taken = {alias.asname or alias.name: alias.name for alias in node.names}
                origin = self._absolute(path, node)
                if origin.split(".")[0] != PACKAGE:
                    if name in taken:
                        return []
                elif name in taken or "*" in taken:
                    found = self.find(origin, taken.get(name, name), asked)
                    if found is not None:
                        return found
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
                return []
        return [] if self._path(f"{module}.{name}") is not None else None

    def _path(self, module: str) -> str | None:
        start = module.replace(".", "/")
        places = (f"{start}.py", f"{start}/__init__.py")
        return next((place for place in places if place in self._sources), None)

    def _absolute(self, path: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = path.removesuffix(".py").split("/")[: -node.level]
        return ".".join([*parts, node.module] if node.module else parts)


def parameters(node: ast.FunctionDef) -> list[str]:
    """Parameters of a function in order; those that may be left out end in ``=``."""
    given = node.args
    positional = [each.arg for each in (*given.posonlyargs, *given.args)]
    optional = len(given.defaults)
    marked = [
        f"{name}=" if len(positional) - index <= optional else name
        for index, name in enumerate(positional)
    ]
    keywords = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return marked + [each.arg if default is None else f"{each.arg}=" for each, default in keywords]


def main() -> None:
    """Record a wheel's names."""
    wheel = Wheel(Path(sys.argv[1]))
    found = {f"{module}:{name}": wheel.find(module, name) for module, name in used()}
    present = {name: signature for name, signature in found.items() if signature is not None}
    release = ".".join(wheel.version.split(".")[:2])
    file = RECORDED / f"vllm_names_{release}.json"
    file.write_text(json.dumps({"version": wheel.version, "names": present}, indent=1) + "\n")
    print(f"{file}: {len(present)} of {len(found)} names")
    for name in found.keys() - present.keys():
        print(f"absent: {name}")


if __name__ == "__main__":
    main()
