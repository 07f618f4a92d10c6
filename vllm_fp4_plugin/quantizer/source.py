"""Source checkpoint: config, headers, and tensors that are mapped one by one."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from vllm_fp4_plugin.checkpoint.files import read_headers
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.formats.modelopt import LEGACY_FILE
from vllm_fp4_plugin.quantizer.errors import QuantizerError
from vllm_fp4_plugin.quantizer.tensor_file import DTYPES, TensorSpec

FLOAT_DTYPES = ("BF16", "F16", "F32")  # weights that can be quantised

_QUANTIZED_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Source:
    """A Hugging Face checkpoint on disk.

    Attributes:
        folder: folder of the checkpoint.
        config: the parsed ``config.json``.
        specs: dtype and shape of every tensor, in the order of the shards.
        shards: file of each tensor, by tensor name.
    """

    folder: Path
    config: dict[str, Any]
    specs: dict[str, TensorSpec]
    shards: dict[str, Path]

    def load(self, name: str) -> Tensor:
        """Map a stored tensor from its file; the mapping ends with the tensor's last reference."""
        # Opened anew for each tensor: a mapping kept open keeps every page it ever read resident.
        with safe_open(self.shards[name], framework="pt") as file:
            return file.get_tensor(name)


def open_source(folder: Path) -> Source:
    """Read the config and the tensor headers of a checkpoint.

    Raises:
        QuantizerError: the folder, its config or a shard is missing or damaged, the checkpoint is
            quantised already, or a dtype is not in ``DTYPES``.
    """
    if not folder.is_dir():
        raise QuantizerError(f"src: {folder} is not a folder; give a local checkpoint's folder")
    config = _read_config(folder)
    try:
        headers = read_headers(folder)
    except UnsupportedCheckpoint as error:
        raise QuantizerError(f"src: {error}") from error
    if not headers:
        raise QuantizerError(
            f"src: {folder} holds no safetensors files; save the model with save_pretrained(), "
            "which writes them"
        )
    for name, header in headers.items():
        if header.dtype not in DTYPES:
            raise QuantizerError(
                f"{name}: dtype is {header.dtype}, must be one of {', '.join(DTYPES)}; convert it"
            )
    specs = {name: TensorSpec(header.dtype, header.shape) for name, header in headers.items()}
    shards = {name: header.file for name, header in headers.items()}
    return Source(folder, config, specs, shards)


def _read_config(folder: Path) -> dict[str, Any]:
    config = _read_json(folder / "config.json")
    nested = [config, *(v for v in config.values() if isinstance(v, dict))]
    quantized = any(key in part for part in nested for key in _QUANTIZED_KEYS)
    if quantized or (folder / LEGACY_FILE).exists():
        raise QuantizerError(
            f"src: {folder} is quantised already; give the 16-bit checkpoint it was made from"
        )
    return config


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise QuantizerError(
            f"src: {file.parent} has no {file.name}; give a Hugging Face checkpoint's folder"
        ) from None
    except ValueError as error:
        raise QuantizerError(f"src: {file.name} is not valid JSON ({error}); mend it") from error
    if not isinstance(content, dict):
        raise QuantizerError(
            f"src: {file.name} holds {type(content).__name__}, must hold a JSON object; give a "
            "Hugging Face checkpoint's folder"
        )
    return content
