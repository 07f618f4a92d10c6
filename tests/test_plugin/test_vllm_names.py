"""Names of vLLM that the plugin uses: all exist, and a missing name gives an error of one line."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import vllm_fp4_plugin
from tests.vllm_names import ROOT, SOURCES, is_module, names_in
from vllm_fp4_plugin import versions
from vllm_fp4_plugin.commands import tried
from vllm_fp4_plugin.fusion import add_rms_norm
from vllm_fp4_plugin.versions import IncompatibleVllm


@cache
def bound_names(module: str) -> frozenset[str]:
    """Names that a module's source binds in any branch, as names for CUDA are missing on CPU."""
    spec = find_spec(module)
    assert spec is not None, f"vllm has no {module}"
    if spec.origin is None:
        return frozenset()
    found: set[str] = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def has(module: str, name: str) -> bool:
    found = is_module(f"{module}.{name}") or name in bound_names(module)
    return found or hasattr(import_module(module), name)


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_vllm_has_every_name(file: Path) -> None:
    gone = [f"{m}.{n}" for m, n in names_in(file.read_text(encoding="utf-8")) if not has(m, n)]
    assert gone == []


def test_names_are_found_wherever_they_stand() -> None:
    source = """
from vllm import ir
from vllm.config import VllmConfig as Config

def late():
    from vllm.gone import Name
    return ir.ops, ir.nothing
"""
    found = list(names_in(source))
    assert sorted(found) == [
        ("vllm", "ir"), ("vllm.config", "VllmConfig"), ("vllm.gone", "Name"),
        ("vllm.ir", "nothing"), ("vllm.ir", "ops"),
    ]  # fmt: skip
    assert not has("vllm.ir", "nothing")


def test_the_sources_use_vllm() -> None:
    """Names are found in the sources; otherwise the test above would check nothing."""
    assert len({name for file in SOURCES for name in names_in(file.read_text())}) > 50


# --- a missing name -----------------------------------------------------------------------------

REGISTRY = "vllm.v1.attention.backends.registry"


def message(name: str) -> str:
    here = versions.vllm_version()
    expected = "expected vllm 0.32 or 0.33; install 'vllm>=0.32,<0.34'"
    return f"vllm_fp4_plugin: vllm {here} has no '{name}'; {expected}"


def test_a_name_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"{REGISTRY}.register_backend")
    with pytest.raises(IncompatibleVllm) as refused:
        vllm_fp4_plugin.register()
    assert str(refused.value) == message(f"{REGISTRY}.register_backend")


def test_a_module_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, REGISTRY, None)
    with pytest.raises(IncompatibleVllm) as refused:
        vllm_fp4_plugin.register()
    assert str(refused.value) == message(REGISTRY)


def test_an_attribute_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"{REGISTRY}.AttentionBackendEnum.is_overridden")
    with pytest.raises(IncompatibleVllm) as refused:
        vllm_fp4_plugin.register()
    assert str(refused.value) == message(f"{REGISTRY}.AttentionBackendEnum.is_overridden")


@pytest.mark.processes
def test_an_ir_that_is_gone() -> None:
    """Norms take another path without vLLM's IR, whose removal vLLM has announced."""
    command = [sys.executable, "-m", "tests.without_ir"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "error",
    [
        ImportError("cannot import name 'x' from 'numpy' (numpy.py)", name="numpy"),
        ModuleNotFoundError("No module named 'triton'", name="triton"),
        AttributeError("'int' object has no attribute 'x'", name="x", obj=1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_stay_as_they_are(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(add_rms_norm, "register", fail)
    with pytest.raises(type(error)) as raised:
        vllm_fp4_plugin.register()
    assert raised.value is error


def test_what_vllm_itself_lacks_stays_as_it_is() -> None:
    """A name that is missing inside vLLM itself is a broken install, not another version."""
    asks = compile("from vllm.config import nothing", "vllm/broken.py", "exec")
    with pytest.raises(ImportError, match="cannot import name 'nothing'") as raised:  # noqa: SIM117
        with versions.vllm_names():
            exec(asks, {"__name__": "vllm.broken"})
    assert not isinstance(raised.value, IncompatibleVllm)


# --- versions -----------------------------------------------------------------------------------


def test_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    assert vllm_fp4_plugin.__version__ == versions.PLUGIN
    assert "version" in project["dynamic"]
    for extra in ("cpu", "cuda"):
        _, _, accepted = project["optional-dependencies"][extra][0].partition(">=")
        assert f"install 'vllm>={accepted}'" == versions.REMEDY
    oldest, newest = versions.RELEASES[0], versions.RELEASES[-1].split(".")
    assert accepted == f"{oldest},<{newest[0]}.{int(newest[1]) + 1}"


@pytest.mark.processes
def test_version_option() -> None:
    command = [sys.executable, "-m", "vllm_fp4_plugin", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *lines, together = done.stdout.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == ["vllm_fp4_plugin", "vllm", "torch", "nvidia-cutlass-dsl"]
    assert lines == versions.lines()
    assert together == tried.verdict(tried.here())
