"""Dry load: a model on the meta device loads tensors without values, from headers alone."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_fp4_plugin.checkpoint import files as checkpoint_files
from vllm_fp4_plugin.checkpoint.arrivals import Checkpoint
from vllm_fp4_plugin.checkpoint.completeness import CompleteLoad
from vllm_fp4_plugin.checkpoint.files import TensorHeader


class UnknownFiles(ValueError):
    """Error for a model that reads files that are missing, or have no safetensors headers."""


def dry_load(model: Any, directory: Path, headers: Mapping[str, TensorHeader]) -> None:
    """Load tensors with a checkpoint's names, dtypes and shapes into a model on the meta device.

    Raises:
        UnsupportedCheckpoint: a tensor is missing, unknown to the model, or does not fit.
        UnknownFiles: the model reads further files that are missing or not safetensors.
    """
    offered = dict(_offered(model, directory, headers))
    CompleteLoad(model, Checkpoint(str(directory)), has_values=False)(_without_values(offered))


def _offered(
    model: Any, directory: Path, headers: Mapping[str, TensorHeader]
) -> Iterator[tuple[str, TensorHeader]]:
    """Yield name and header of each tensor that vLLM's loader would pass to ``model``.

    Tensors that the model declares unused are left out. Names from a secondary source get the
    source's prefix.
    """
    is_unused = getattr(model, "is_unused_checkpoint_weight", lambda name: False)
    yield from ((name, header) for name, header in headers.items() if not is_unused(name))
    for source in getattr(model, "secondary_weights", ()):
        for name, header in _headers_of(source).items():
            yield source.prefix + name, header


def _headers_of(source: Any) -> Mapping[str, TensorHeader]:
    """Headers, by tensor name, of the files of a model's ``DefaultModelLoader.Source``."""
    patterns = source.allow_patterns_overrides or ["*.safetensors"]
    place = checkpoint_files.local_directory(source.model_or_path, source.revision)
    folder = None if place is None else place / (source.subfolder or "")
    files = folder.iterdir() if folder is not None and folder.is_dir() else ()
    found = [file for file in files if any(fnmatch(file.name, each) for each in patterns)]
    if not found or any(file.suffix != ".safetensors" for file in found):
        raise UnknownFiles(f"its model reads {', '.join(patterns)} of {source.model_or_path}")
    return {n: header for file in found for n, header in checkpoint_files.read_file(file).items()}


def _without_values(headers: Mapping[str, TensorHeader]) -> Iterator[tuple[str, Tensor]]:
    for name, header in headers.items():
        # Not on the meta device: models read single numbers, and may keep a parameter elsewhere.
        dtype = checkpoint_files.dtype_of(name, header)
        yield name, torch.zeros((), dtype=dtype).expand(header.shape)
