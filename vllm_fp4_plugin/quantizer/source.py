"""The checkpoint to quantise: its config, and its tensors one at a time."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_fp4_plugin.quantizer.errors import QuantizerError
from vllm_fp4_plugin.quantizer.tensor_file import DTYPES, INDEX_FILE, SINGLE_FILE, TensorSpec

_QUANTIZED_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Source:
    """A Hugging Face checkpoint on disk.

    Attributes:
        folder: where it lies.
        config: the parsed ``config.json``.
        specs: dtype and shape of every tensor, in the order of the shards.
        shards: the file that holds each tensor.
    """

    folder: Path
    config: dict[str, Any]
    specs: dict[str, TensorSpec]
    shards: dict[str, Path]

    def load(self, name: str) -> Tensor:
        """The tensor as stored, mapped from its file: freed with the last reference to it."""
        # Opened anew each time: a mapping kept open keeps every page it ever read resident.
        with safe_open(self.shards[name], framework="pt") as file:
            return file.get_tensor(name)


def open_source(folder: Path) -> Source:
    """Read the headers of a checkpoint.

    Raises:
        QuantizerError: the folder, its config or a shard is missing, damaged or quantised already.
    """
    if not folder.is_dir():
        raise QuantizerError(f"src: {folder} is not a folder; give a local checkpoint's folder")
    config = _read_config(folder)
    specs: dict[str, TensorSpec] = {}
    shards: dict[str, Path] = {}
    for shard in _shard_files(folder):
        for name, spec in _read_specs(shard).items():
            specs[name] = spec
            shards[name] = shard
    return Source(folder, config, specs, shards)


def _read_config(folder: Path) -> dict[str, Any]:
    config = _read_json(folder / "config.json")
    nested = [config, *(v for v in config.values() if isinstance(v, dict))]
    quantized = any(key in part for part in nested for key in _QUANTIZED_KEYS)
    if quantized or (folder / "hf_quant_config.json").exists():
        raise QuantizerError(
            f"src: {folder} is quantised already; give the 16-bit checkpoint it was made from"
        )
    return config


def _shard_files(folder: Path) -> list[Path]:
    if (folder / INDEX_FILE).exists():
        weight_map = _read_json(folder / INDEX_FILE).get("weight_map", {})
        files = [folder / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not file.exists():
                raise QuantizerError(
                    f"src: {INDEX_FILE} names {file.name}, which is not in {folder}; "
                    "complete the download"
                )
    else:
        files = [file for file in [folder / SINGLE_FILE] if file.exists()]
    if not files:
        raise QuantizerError(
            f"src: {folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; save the model with "
            "save_pretrained(), which writes safetensors"
        )
    return files


def _read_specs(shard: Path) -> dict[str, TensorSpec]:
    specs = {}
    try:
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no mapping
                piece = file.get_slice(name)
                specs[name] = TensorSpec(piece.get_dtype(), tuple(piece.get_shape()))
    except SafetensorError as error:
        raise QuantizerError(
            f"src: {shard.name} is truncated or no safetensors file ({error}); fetch it again"
        ) from error
    for name, spec in specs.items():
        if spec.dtype not in DTYPES:
            raise QuantizerError(
                f"{name}: dtype is {spec.dtype}, must be one of {', '.join(DTYPES)}; convert it"
            )
    return specs


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise QuantizerError(
            f"src: {file.parent} has no {file.name}; give a Hugging Face checkpoint's folder"
        ) from None
    except ValueError as error:
        raise QuantizerError(f"src: {file.name} is not valid JSON ({error}); mend it") from error
