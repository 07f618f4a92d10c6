"""Distributions of the project, built from a copy of the checkout."""

import shutil
import tarfile
from pathlib import Path

import pytest

from tests.test_package.building import build

NOT_SOURCE = ("*.egg-info", ".*", "__pycache__", "build", "dist")


@pytest.fixture(scope="session")
def source(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the checkout, because building writes into it; includes tests and examples."""
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
    """Published wheel: built from the source distribution, as by ``make dist``."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (folder,) = unpacked.iterdir()
    return build("build_wheel", folder, tmp_path_factory.mktemp("wheel"))
