"""Writer of safetensors files whose tensors arrive one at a time.

The ``safetensors`` package serialises a whole file at once. This writer writes the header first,
from dtypes and shapes known in advance, and then each tensor straight to the tensor's offset.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vllm_fp4_plugin.checkpoint.files import INDEX

SINGLE_FILE = "model.safetensors"

# Names the safetensors header uses.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorSpec:
    """Description of a tensor in a safetensors header; ``dtype`` is a key of ``DTYPES``."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class TensorWriter:
    """Writer of the tensors that ``specs`` describes, in any order, in Hugging Face's layout.

    Files are one ``model.safetensors``, or an index and shards whose tensors have at most
    ``max_shard_bytes`` (a larger tensor gets a shard of its own). Memory is limited to the tensor
    being written.
    """

    def __init__(self, folder: Path, specs: Mapping[str, TensorSpec], max_shard_bytes: int):
        self._specs = specs
        self._places: dict[str, tuple[Path, int]] = {}
        self._missing = set(specs)
        shards = _split(specs, max_shard_bytes)
        files = [folder / f"model-{i:05}-of-{len(shards):05}.safetensors" for i in _counted(shards)]
        if len(shards) == 1:
            files = [folder / SINGLE_FILE]
        else:
            _write_index(folder, specs, dict(zip(files, shards, strict=True)))
        for file, names in zip(files, shards, strict=True):
            self._start(file, names)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, whose dtype and shape must match the spec, at the tensor's offset."""
        spec = self._specs[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (DTYPES[spec.dtype], spec.shape), name
        file, offset = self._places[name]
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        self._missing.remove(name)

    def finish(self) -> None:
        """Check that every declared tensor has been written."""
        assert not self._missing, sorted(self._missing)

    def _start(self, file: Path, names: list[str]) -> None:
        # Widest type first, so that every tensor is aligned to its own element size.
        names = sorted(names, key=lambda n: (-DTYPES[self._specs[n].dtype].itemsize, n))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets: dict[str, int] = {}
        end = 0
        for name in names:
            spec = self._specs[name]
            offsets[name], end = end, end + spec.nbytes
            header[name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [offsets[name], end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(start + end)
        self._places |= {name: (file, start + offset) for name, offset in offsets.items()}


def _split(specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, spec in specs.items():
        if spec.nbytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= spec.nbytes
    return shards


def _counted(shards: list[list[str]]) -> range:
    return range(1, len(shards) + 1)


def _write_index(
    folder: Path, specs: Mapping[str, TensorSpec], shards: Mapping[Path, list[str]]
) -> None:
    weight_map = {name: file.name for file, names in shards.items() for name in names}
    total = sum(spec.nbytes for spec in specs.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
