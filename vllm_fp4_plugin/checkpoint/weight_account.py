"""Account of a model's weights: bytes by kind of module; the kinds add up to all bytes."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_fp4_plugin.checkpoint.files import STACKED, TensorHeader
from vllm_fp4_plugin.checkpoint.kinds_stored import EXPERTS

LINEAR, HEAD, EMBEDDINGS, NORMS, OTHERS = "linear layers", "head", "embeddings", "norms", "others"
KINDS = (LINEAR, EXPERTS, HEAD, EMBEDDINGS, NORMS, OTHERS)

_MATRICES = ("weight", "weight_packed")
# Last parts of module names; configs have no common field for them.
_HEADS = ("lm_head", "embed_out")
_LOOKUPS = ("wte", "wpe", "shared")
_NORMS = ("ln", "ln_1", "ln_2", "ln_f")
_CODES_PER_BYTE = 2


@dataclass
class Part:
    """Sums over the modules of one kind.

    Attributes:
        names: last parts of the module names, with a count of each.
        elements: number of weights, without scales and biases.
        nbytes: bytes of all tensors, scales included.
    """

    names: Counter[str] = field(default_factory=Counter)
    elements: int = 0
    nbytes: int = 0

    @property
    def bytes_per_weight(self) -> float:
        """Bytes per weight, scales included; 0 without weights."""
        return self.nbytes / self.elements if self.elements else 0.0

    def json(self) -> dict[str, Any]:
        """Figures of this part as a JSON object."""
        return {
            "bytes": self.nbytes,
            "weights": self.elements,
            "bytes_per_weight": self.bytes_per_weight or None,
            "modules": dict(self.names),
        }


@dataclass
class WeightAccount:
    """Weights of a model by the kinds of ``KINDS``; kinds without weights are absent.

    Attributes:
        parts: sums over the modules of each kind, by kind.
    """

    parts: dict[str, Part] = field(default_factory=dict)

    def add(self, kind: str, module: str, elements: int, nbytes: int) -> None:
        """Add a module of a kind: the module's name, number of weights and bytes."""
        part = self.parts.setdefault(kind, Part())
        part.names[_short(module)] += 1
        part.elements += elements
        part.nbytes += nbytes

    def json(self) -> dict[str, Any]:
        """Parts by kind, as a JSON object."""
        return {kind: part.json() for kind, part in self.parts.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def elements(self) -> int:
        """Number of weights of all modules."""
        return sum(part.elements for part in self.parts.values())


def of_files(headers: Mapping[str, TensorHeader]) -> WeightAccount:
    """Account of a checkpoint's tensors, classified by name."""
    modules: dict[str, dict[str, TensorHeader]] = {}
    for name, header in headers.items():
        module, _, tensor = name.rpartition(".")
        modules.setdefault(module, {})[tensor] = header
    account = WeightAccount()
    for module, tensors in modules.items():
        elements = sum(_elements(tensor, header) for tensor, header in tensors.items())
        size = sum(_nbytes(header) for header in tensors.values())
        account.add(_kind_by_name(module, tensors), module, elements, size)
    return account


def files_nbytes(headers: Mapping[str, TensorHeader]) -> int:
    """Total bytes of a checkpoint's weight files."""
    files: Iterable[Path] = {header.file for header in headers.values()}
    return sum(file.stat().st_size for file in files)


def _kind_by_name(module: str, tensors: Mapping[str, TensorHeader]) -> str:
    parts = module.split(".")
    last = parts[-1].lower()
    matrix = next((tensors[name] for name in _MATRICES if name in tensors), None)
    if EXPERTS in parts:
        return EXPERTS
    if last in _HEADS or module == "output":  # Mistral's name
        return HEAD
    if "norm" in last or last in _NORMS:
        return NORMS
    if matrix is None or not 2 <= len(matrix.shape) <= STACKED:
        return OTHERS
    return EMBEDDINGS if "embed" in last or last in _LOOKUPS else LINEAR


def _elements(tensor: str, header: TensorHeader) -> int:
    """Number of weights in a tensor; 0 for scales and biases."""
    if "scale" in tensor or tensor.endswith("bias"):
        return 0
    return math.prod(header.shape) * (_CODES_PER_BYTE if header.dtype == "U8" else 1)


def _nbytes(header: TensorHeader) -> int:
    """Bytes of a tensor, by the bits per element in the dtype's name; BOOL has 8 bits."""
    bits = re.search(r"\d+", header.dtype)
    return math.prod(header.shape) * (int(bits[0]) if bits else 8) // 8


def _short(module: str) -> str:
    """Last part of a module's name; the last two parts if the last is a number."""
    *above, last = module.split(".")
    return f"{above[-1]}.{last}" if last.isdecimal() and above else last
