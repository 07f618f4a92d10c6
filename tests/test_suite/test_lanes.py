"""Lanes: the sources of a test file, and the rule that leaves out thorough tests."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import lanes

FILES = {
    "kernels/nvfp4_kernels/__init__.py": "from nvfp4_kernels.gemm import gemm\n",
    "kernels/nvfp4_kernels/gemm/__init__.py": "from nvfp4_kernels.gemm.op import gemm\n",
    "kernels/nvfp4_kernels/gemm/op.py": "from nvfp4_kernels.gemm.kernels import TABLE\n",
    "kernels/nvfp4_kernels/gemm/kernels.py": 'TABLE = "nvfp4_kernels.gemm.launch:gemm"\n',
    "kernels/nvfp4_kernels/gemm/launch.py": "def gemm():\n    from tests.helper import x\n",
    "kernels/nvfp4_kernels/moe.py": "",
    "vllm_fp4_plugin/__init__.py": "",
    "examples/__init__.py": "",
    "tests/helper.py": "",
    "tests/other.py": "",
    "tests/cases/table.json": "{}",
    "tests/cases/test_gemm.py": "from nvfp4_kernels import gemm\n",
    "tests/conftest.py": "",
    "tests/lanes.py": "",
    "pyproject.toml": "",
}
TEST = "tests/cases/test_gemm.py"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    places = {name: tmp_path / path.relative_to(lanes.ROOT) for name, path in PACKAGES.items()}
    monkeypatch.setattr(lanes, "PACKAGES", places)
    monkeypatch.setattr(lanes, "RECORD", tmp_path / "tests" / "passed.json")
    monkeypatch.setattr(lanes, "ROOT", tmp_path)
    forget()
    yield tmp_path
    forget()


PACKAGES = dict(lanes.PACKAGES)


def forget() -> None:
    for kept in (lanes.digest, lanes._content, lanes._named_in, lanes._exports, lanes._recorded):
        kept.cache_clear()


def test_sources_are_imports_tables_and_data_beside(tree: Path) -> None:
    found = {path.relative_to(tree).as_posix() for path in lanes.sources(tree / TEST)}
    gemm = {name for name in FILES if "/gemm/" in name and not name.endswith("gemm/__init__.py")}
    assert found == gemm | {TEST, "tests/helper.py", "tests/cases/table.json"} | {
        "kernels/nvfp4_kernels/gemm/__init__.py"
    }


@pytest.mark.parametrize("name", FILES)
def test_a_change_of_a_source_brings_thorough_tests_back(tree: Path, name: str) -> None:
    test = tree / TEST
    assert not lanes.is_unchanged(test)
    lanes.record([test])
    forget()
    assert lanes.is_unchanged(test)
    more = "changed = 1\n" if name.endswith(".py") else "\n"
    (tree / name).write_text(FILES[name] + more)
    forget()
    unrelated = {
        "kernels/nvfp4_kernels/__init__.py",  # only says where gemm is defined
        "kernels/nvfp4_kernels/moe.py",
        "vllm_fp4_plugin/__init__.py",
        "examples/__init__.py",
        "tests/other.py",
    }
    assert lanes.is_unchanged(test) == (name in unrelated)


def test_docstrings_and_comments_do_not_count(tree: Path) -> None:
    test, source = tree / TEST, tree / "kernels/nvfp4_kernels/gemm/launch.py"
    lanes.record([test])
    for text, same in (
        (
            '"""A."""\n\ndef gemm():\n    """B."""\n    from tests.helper import x  # c',
            True,
        ),
        ('def gemm():\n    from tests.helper import x\n    "launched"', False),
    ):
        source.write_text(text)
        forget()
        assert lanes.is_unchanged(test) == same


def test_every_kind_of_thorough_test_is_there() -> None:
    names = [p.relative_to(lanes.ROOT).as_posix() for p in lanes.ROOT.glob("tests/**/test_*.py")]
    kinds = lanes.THOROUGH.pattern.partition("(")[2][:-1].split("|")
    for kind in kinds:
        assert any(re.match(f"tests/{kind}", name) for name in names), kind


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--quick"], "--quick"),
        (["-k", "x"], "-k"),
        (["-x"], "--maxfail"),
        (["--lane", "test"], "--lane test"),
    ],
)
def test_a_part_of_the_tests_is_not_recorded(options: list[str], named: str) -> None:
    command = [sys.executable, "-m", "pytest", "--record", "--collect-only", *options]
    done = subprocess.run(command, cwd=lanes.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--record: given with {named}, must be a run of all tests; leave it out" in done.stderr


@pytest.mark.processes
def test_files_that_failed_are_not_recorded(tmp_path: Path) -> None:
    """A whole run records the files whose tests have all passed."""
    shutil.copytree(lanes.ROOT / "tests", tmp_path / "tests", ignore=_tests_among)
    shutil.copy(lanes.ROOT / "pyproject.toml", tmp_path)
    for name, outcome in (("test_good.py", "True"), ("test_bad.py", "False")):
        (tmp_path / "tests" / name).write_text(f"def test() -> None:\n    assert {outcome}\n")
    command = [sys.executable, "-m", "pytest", "-q", "--record"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert list(json.loads((tmp_path / "tests/passed.json").read_text())) == ["tests/test_good.py"]


def _tests_among(folder: str, names: list[str]) -> set[str]:
    """Names of test files, folders of tests and the record; helpers of ``conftest.py`` stay."""
    return {n for n in names if n.startswith("test_") or n == "passed.json"}
