import shutil
from pathlib import Path

import pytest

from tests.test_quantizer.checkpoints import save_checkpoint


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of two decoder layers in bfloat16, in one file; read-only."""
    return save_checkpoint(tmp_path_factory.mktemp("llama") / "src")


@pytest.fixture(scope="session")
def sharded_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of two decoder layers in bfloat16, in several files; read-only."""
    folder = tmp_path_factory.mktemp("sharded") / "src"
    return save_checkpoint(folder, max_shard_size="50KB")


@pytest.fixture
def src(llama: Path, tmp_path: Path) -> Path:
    """Copy of ``llama`` that a test may change."""
    return Path(shutil.copytree(llama, tmp_path / "src"))


@pytest.fixture
def sharded_src(sharded_llama: Path, tmp_path: Path) -> Path:
    """Copy of ``sharded_llama`` that a test may change."""
    return Path(shutil.copytree(sharded_llama, tmp_path / "src"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of 10,000 byte-level tokens."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    words = [f"{n * n:x} " for n in range(3000)]
    file.write_text("".join(words)[:10_000])
    return file
