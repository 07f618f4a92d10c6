"""Rehearsal of a load: a model without weights takes tensors without values."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_fp4_plugin import checkpoint_files
from vllm_fp4_plugin.arrivals import Checkpoint
from vllm_fp4_plugin.checkpoint_files import TensorHeader
from vllm_fp4_plugin.completeness import CompleteLoad


def rehearse(model: Any, directory: Path, headers: Mapping[str, TensorHeader]) -> None:
    """Have a model on the meta device load tensors of a checkpoint's names, dtypes and shapes.

    Raises:
        UnsupportedCheckpoint: one is missing, unknown to the model, or does not fit it.
    """
    CompleteLoad(model, Checkpoint(str(directory)), has_values=False)(_hollow(headers))


def _hollow(headers: Mapping[str, TensorHeader]) -> Iterator[tuple[str, Tensor]]:
    for name, header in headers.items():
        # Not on the meta device: models look at single numbers, and may keep a parameter elsewhere.
        dtype = checkpoint_files.dtype_of(name, header)
        yield name, torch.zeros((), dtype=dtype).expand(header.shape)
