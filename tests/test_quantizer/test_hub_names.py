"""Names on the hub: cached models are used, others are refused with a remedy."""

from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from tests import hub_cache
from tests.test_quantizer.checkpoints import read_tensors
from vllm_fp4_plugin.checkpoint import model_source
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint
from vllm_fp4_plugin.quantizer.errors import QuantizerError

NAME = "org/tiny"


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


def test_a_downloaded_name_is_quantised(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hub_cache.put(llama, NAME, tmp_path / "cache", monkeypatch)
    quantize_checkpoint(NAME, tmp_path / "dst")
    assert "model.layers.0.mlp.up_proj.weight_scale_2" in read_tensors(tmp_path / "dst")


def test_a_name_that_is_not_downloaded(tmp_path: Path):
    said = rf"^src: {NAME}: is no directory, and not all of its files are .* `hf download {NAME}`"
    with pytest.raises(QuantizerError, match=said):
        quantize_checkpoint(NAME, tmp_path / "dst")


def test_a_name_downloaded_in_part(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = hub_cache.put(llama, NAME, tmp_path / "cache", monkeypatch)
    (found / "model.safetensors").unlink()
    model_source.check_config(NAME)
    with pytest.raises(UnsupportedCheckpoint, match="not all of its files are in the hub's cache"):
        model_source.whole_directory(NAME)


def test_a_config_that_is_not_downloaded(tmp_path: Path):
    with pytest.raises(UnsupportedCheckpoint) as refused:
        model_source.check_config(NAME)
    assert str(refused.value) == (
        f"{NAME}: is no directory, its config.json is not in the hub's cache ({tmp_path}/cache), "
        f"and HF_HUB_OFFLINE forbids to download it; download it with `hf download {NAME}` where "
        "there is a network, or give the directory of a checkpoint"
    )


def test_a_download_that_failed_is_explained_where_the_config_is_missing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A model with a cached config lacks another file, which the original error names."""
    failed = OSError("We couldn't connect")
    failed.__cause__ = LocalEntryNotFoundError("check your connection")
    said = model_source.explained(NAME, failed)
    assert said is not None
    assert str(said).startswith(f"{NAME}: is no directory, its config.json is not in the hub's")
    assert model_source.explained(NAME, OSError("no memory")) is None
    assert model_source.explained(str(tmp_path), failed) is None
    hub_cache.put(llama, NAME, tmp_path / "cache", monkeypatch)
    assert model_source.explained(NAME, failed) is None


@pytest.mark.parametrize("path", ["./absent", "/absent", "~/absent", "a/b/c", "name with spaces"])
@pytest.mark.parametrize("find", [model_source.check_config, model_source.whole_directory])
def test_a_path_is_not_taken_for_a_name(find, path: str):
    said = rf"^{path}: is no directory, must be that of a checkpoint, or a name at the hub"
    with pytest.raises(UnsupportedCheckpoint, match=said):
        find(path)


def test_a_file_is_no_model(tmp_path: Path):
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(UnsupportedCheckpoint, match=r"gguf: is no directory but a file, must be"):
        model_source.check_config(str(file))
