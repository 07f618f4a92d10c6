"""Local cache of the Hugging Face hub with one model, as after a download."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put(model: Path, name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy a model into a cache under the name ``name``; returns the folder of the copied files."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return shutil.copytree(model, folder / "snapshots" / COMMIT)
