"""Hugging Face ``config.json`` of a decoder, with fields that are checked when read."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4_kernels.precompile.model import DTYPES, Dtype

LEGACY_FILE = "hf_quant_config.json"  # quantisation config of older exports


class UnusableModel(ValueError):
    """Model config, or option of a command, that does not define layers to build kernels for."""


@dataclass(frozen=True)
class ModelConfig:
    """Config of a decoder; for a multimodal model, of the text part.

    Attributes:
        name: name of the model, for tables and messages.
        fields: fields of the file, or of the text part.
        quantization: ``quantization_config``; empty if the weights are 16-bit.
    """

    name: str
    fields: dict[str, Any]
    quantization: dict[str, Any]

    @property
    def model_type(self) -> str:
        """Family of the model, the ``model_type`` field; empty if the file has no such field."""
        return str(self.fields.get("model_type") or "")

    def number(self, *keys: str, default: int | None = None) -> int:
        """Number under the first of ``keys`` that the config has, or the default.

        Raises:
            UnusableModel: the number is missing, or not a positive integer.
        """
        key = next((key for key in keys if self.fields.get(key) is not None), keys[0])
        value = default if self.fields.get(key) is None else self.fields[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.malformed(key, value, "a positive number")
        return value

    def malformed(self, key: str, value: object, accepted: str) -> UnusableModel:
        """Build the error for a field whose value is not of the accepted form."""
        return UnusableModel(
            f"{self.name}: {key} is {value!r}, must be {accepted}; give the config.json of a "
            "decoder such as Llama, Mistral or Qwen, or sizes with --linear and --gate-up"
        )

    def share(self, size: int, gpus: int, key: str, option: str = "--tensor-parallel") -> int:
        """Share of ``size`` on each of ``gpus`` GPUs; ``key`` and ``option`` name both for errors.

        Raises:
            UnusableModel: the size is not divisible by ``gpus``.
        """
        if gpus < 1 or size % gpus:
            raise UnusableModel(
                f"{self.name}: {option} is {gpus}, must divide {key} = {size}; choose another"
            )
        return size // gpus

    @property
    def dtype(self) -> Dtype:
        """Dtype of activations and layer outputs.

        Raises:
            UnusableModel: the config's dtype is not bfloat16 or float16.
        """
        given = self.fields.get("dtype") or self.fields.get("torch_dtype") or "bfloat16"
        for dtype in DTYPES:
            if given == dtype:
                return dtype
        raise UnusableModel(
            f"{self.name}: dtype is {given!r}, must be {' or '.join(DTYPES)}; choose one with "
            "--dtype"
        )


def load_config(path: Path) -> ModelConfig:
    """Read a model's config.

    Args:
        path: ``config.json`` or its directory.

    Raises:
        UnusableModel: the file is missing, or does not hold a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    whole = _load(file, path)
    text = whole.get("text_config")
    fields = text if isinstance(text, dict) else whole
    quantization = whole.get("quantization_config") or fields.get("quantization_config") or {}
    legacy = file.with_name(LEGACY_FILE)
    if not quantization and file.name == "config.json" and legacy.exists():
        quantization = _load(legacy, legacy)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return ModelConfig(name, fields, quantization if isinstance(quantization, dict) else {})


def _load(file: Path, path: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise UnusableModel(
            f"{path}: cannot be read ({error.strerror or error}), must be a config.json or its "
            "directory; download the model's first"
        ) from error
    except ValueError as error:
        raise UnusableModel(f"{file}: is no JSON ({error}); download it again") from error
    if not isinstance(config, dict):
        raise UnusableModel(f"{file}: is no JSON object; give a Hugging Face config.json")
    return config
