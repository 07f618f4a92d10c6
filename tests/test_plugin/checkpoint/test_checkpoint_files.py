"""Files that are missing, truncated or inconsistent are refused before loading."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_fp4_plugin.checkpoint.files import INDEX, check_nvfp4, quantised_modules, read_headers
from vllm_fp4_plugin.formats import FORMATS, CheckpointConfig, UnsupportedCheckpoint

MODULE = "model.layers.0.mlp.down_proj"


def tensors() -> dict[str, Tensor]:
    return {
        f"{MODULE}.weight": torch.zeros(32, 24, dtype=torch.uint8),
        f"{MODULE}.weight_scale": torch.zeros(32, 3).to(torch.float8_e4m3fn),
        f"{MODULE}.weight_scale_2": torch.tensor(0.5),
        f"{MODULE}.input_scale": torch.tensor(0.5),
        "model.norm.weight": torch.ones(48, dtype=torch.bfloat16),
    }


def checkpoint(weight_only: bool = False) -> CheckpointConfig:
    return CheckpointConfig(FORMATS["modelopt"], weight_only)


def sharded(directory: Path) -> Path:
    """Checkpoint whose tensors are split over two files, with an index."""
    everything = tensors()
    norm = {"model.norm.weight": everything.pop("model.norm.weight")}
    save_file(everything, directory / "model-00001-of-00002.safetensors")
    save_file(norm, directory / "model-00002-of-00002.safetensors")
    weight_map = dict.fromkeys(everything, "model-00001-of-00002.safetensors")
    weight_map |= dict.fromkeys(norm, "model-00002-of-00002.safetensors")
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def test_whole_checkpoints_pass(tmp_path: Path) -> None:
    headers = read_headers(sharded(tmp_path))
    assert headers[f"{MODULE}.weight"].shape == (32, 24)
    assert headers["model.norm.weight"].dtype == "BF16"
    check_nvfp4(headers, checkpoint())


def test_no_safetensors_is_nothing_to_check(tmp_path: Path) -> None:
    assert read_headers(tmp_path) == {}


def test_missing_shard(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UnsupportedCheckpoint, match=r"00002-of-00002\.safetensors: is missing"):
        read_headers(tmp_path)


def test_index_names_an_absent_tensor(tmp_path: Path) -> None:
    index = json.loads((sharded(tmp_path) / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(UnsupportedCheckpoint, match=r"holds no tensor lm_head\.weight"):
        read_headers(tmp_path)


@pytest.mark.parametrize("keep", [-1, 100, 3, 0])
def test_truncated_file(keep: int, tmp_path: Path) -> None:
    file = sharded(tmp_path) / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UnsupportedCheckpoint, match=r"00001-of-00002\.safetensors: is truncated"):
        read_headers(tmp_path)


def test_garbled_header(tmp_path: Path) -> None:
    file = sharded(tmp_path) / "model-00001-of-00002.safetensors"
    raw = bytearray(file.read_bytes())
    raw[8] = ord("x")
    file.write_bytes(raw)
    with pytest.raises(UnsupportedCheckpoint, match="or no safetensors file"):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("{}", "holds no weight_map, must be an object that has one; copy or download"),
        ("[]", "holds no weight_map"),
        ('{"weight_map": []}', "weight_map: is a list, must be an object of tensors' files"),
        ('{"weight_map": null}', "weight_map: is a NoneType"),
        ('{"weight_map": {"a": 1}}', "weight_map: of a is 1, must be the name of a file"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "weight_map: of a is '../b.*', must lie in"),
        ('{"weight_map": {"a": "/b.safetensors"}}', "weight_map: of a is '/b.*', must lie in the"),
        ('{"weight_map": {"a": ["b"]}}', r"weight_map: of a is \['b'\]"),
    ],
)
def test_garbled_index(content: str, message: str, tmp_path: Path) -> None:
    (sharded(tmp_path) / INDEX).write_text(content)
    with pytest.raises(UnsupportedCheckpoint, match=rf"index\.json: {message}"):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_scale": None}, r"down_proj\.weight_scale: is missing beside"),
        ({"input_scale": None}, r"down_proj\.input_scale: is missing beside"),
        ({"weight": None}, r"down_proj\.weight: is missing beside"),
        ({"weight_scale_2": None}, "holds no weight_scale_2, so no NVFP4 weights"),
        ({"weight": torch.zeros(32, 48).bfloat16()}, "weight: dtype is BF16, must be U8"),
        ({"weight_scale": torch.zeros(32, 3)}, "weight_scale: dtype is F32, must be F8_E4M3"),
        (
            {"weight_scale": torch.zeros(32, 2).to(torch.float8_e4m3fn)},
            r"weight_scale: shape is \(32, 2\), must be \(32, 3\)",
        ),
        ({"input_scale": torch.tensor(1.0).half()}, "input_scale: dtype is F16, must be F32"),
        ({"input_scale": torch.ones(2)}, r"input_scale: shape is \(2,\), must be one number"),
        (
            {"weight_global_scale": torch.ones(1)},
            "weight_global_scale: belongs to compressed-tensors's format",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_layer_that_is_not_whole(
    changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    changed = tensors() | {f"{MODULE}.{name}": tensor for name, tensor in changes.items()}
    present = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(present, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match=message):
        check_nvfp4(read_headers(tmp_path), checkpoint())


def test_one_layer_of_several_lacks_its_global_scale(tmp_path: Path) -> None:
    present = tensors() | {
        name.replace("layers.0", "layers.1"): tensor for name, tensor in tensors().items()
    }
    del present["model.layers.1.mlp.down_proj.weight_scale_2"]
    save_file(present, tmp_path / "model.safetensors")
    with pytest.raises(
        UnsupportedCheckpoint, match=r"1\.mlp\.down_proj\.weight_scale_2: is missing"
    ):
        check_nvfp4(read_headers(tmp_path), checkpoint())


def test_weight_only_needs_no_input_scale(tmp_path: Path) -> None:
    present = tensors()
    del present[f"{MODULE}.input_scale"]
    save_file(present, tmp_path / "model.safetensors")
    check_nvfp4(read_headers(tmp_path), checkpoint(weight_only=True))


def test_quantised_layers_are_named(tmp_path: Path) -> None:
    """MXFP4 weights are packed as well, but their scales are powers of two."""
    mx = {
        "model.mx.weight": torch.zeros(32, 32, dtype=torch.uint8),
        "model.mx.weight_scale": torch.zeros(32, 2, dtype=torch.uint8),
    }
    renamed = {name.replace(MODULE, "lm_head"): tensor for name, tensor in tensors().items()}
    save_file(renamed | mx, tmp_path / "model.safetensors")
    assert quantised_modules(read_headers(tmp_path), checkpoint().names) == ["lm_head"]
