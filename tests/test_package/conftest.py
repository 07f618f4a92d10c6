"""The project's distributions, built from a copy of the checkout."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

NOT_SOURCE = ("*.egg-info", ".*", "__pycache__", "build", "dist")
# What a build frontend calls; the hook's argument and result are a folder and a file's name in it.
CALL_HOOK = """
import sys
from setuptools import build_meta
getattr(build_meta, sys.argv[1])(sys.argv[2])
"""


def clean_environment() -> dict[str, str]:
    """This process's environment, without the variables by which the checkout could be found."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}


def build(hook: str, source: Path, out: Path) -> Path:
    """The distribution that setuptools builds of ``source``, isolated from nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", CALL_HOOK, hook, str(out)],
        cwd=source,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="session")
def source(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, since building writes into it; tests and examples are there, too."""
    return shutil.copytree(
        pytestconfig.rootpath,
        tmp_path_factory.mktemp("source") / "checkout",
        ignore=shutil.ignore_patterns(*NOT_SOURCE),
    )


@pytest.fixture(scope="session")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is published: built from the source distribution."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (folder,) = unpacked.iterdir()
    return build("build_wheel", folder, tmp_path_factory.mktemp("wheel"))
