"""Dry load of models that read files in addition to their checkpoint: readouts, heads, towers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from vllm_fp4_plugin.checkpoint.dry_load import UnknownFiles, dry_load
from vllm_fp4_plugin.checkpoint.files import read_headers
from vllm_fp4_plugin.formats import UnsupportedCheckpoint

READOUT = "readout.safetensors"


class Readout(nn.Module):
    """Model whose ``score`` weights come from a separate file, as in Decision 3."""

    def __init__(self, directory: Path, pattern: str = READOUT) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, bias=False)
        self.score = nn.Linear(4, 2, bias=False)
        source: Any = DefaultModelLoader.Source
        self.secondary_weights = [
            source(str(directory), None, prefix="score.", allow_patterns_overrides=[pattern])
        ]

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        return name == "weight"

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        names = set()
        with torch.no_grad():
            for name, weight in weights:
                self.get_parameter(name).copy_(weight)
                names.add(name)
        return names


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_file({"body.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    save_file({"weight": torch.zeros(2, 4)}, tmp_path / READOUT)
    return tmp_path


def test_a_readout_of_its_own_file_is_there(directory: Path) -> None:
    dry_load(Readout(directory), directory, read_headers(directory))


def test_an_e8m0_tensor_goes_into_a_float_parameter(directory: Path) -> None:
    """The load itself accepts this copy; see ``completeness``."""
    weight = torch.ones(4, 4).to(torch.float8_e8m0fnu)
    save_file({"body.weight": weight}, directory / "model.safetensors")
    dry_load(Readout(directory), directory, read_headers(directory))


def test_what_its_file_lacks_is_missing(directory: Path) -> None:
    save_file({"bias": torch.zeros(2)}, directory / READOUT)
    model = Readout(directory)
    model.score.bias = nn.Parameter(torch.zeros(2))
    headers = {n: h for n, h in read_headers(directory).items() if n == "body.weight"}
    with pytest.raises(UnsupportedCheckpoint, match=r"holds no score\.weight"):
        dry_load(model, directory, headers)


@pytest.mark.parametrize("pattern", ["sparse.pt", "other.safetensors"])
def test_files_that_no_header_tells_of(pattern: str, directory: Path) -> None:
    torch.save({}, directory / "sparse.pt")
    with pytest.raises(UnknownFiles, match=rf"its model reads {pattern} of"):
        dry_load(Readout(directory, pattern), directory, read_headers(directory))
