"""vLLM's environment variables, which must not leak from one test file into the next."""

import subprocess
import sys
from pathlib import Path

SETS = """import os

def test_sets():
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
"""
READS = """import os

def test_reads():
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH" not in os.environ
"""


def test_a_file_starts_with_the_variables_of_the_run(tmp_path: Path, monkeypatch, pytestconfig):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH", raising=False)
    (tmp_path / "test_1.py").write_text(SETS)
    (tmp_path / "test_2.py").write_text(READS)
    (tmp_path / "conftest.py").write_text("from tests.conftest import own_variables\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=pytestconfig.rootpath, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "2 passed" in done.stdout, done.stdout
