"""Largest magnitudes, by name."""

import torch
from torch import Tensor


def raise_maximum(found: dict[str, Tensor], name: str, x: Tensor) -> None:
    """Raise the maximum of ``name``, float32 ``()`` on the CPU, to max|x|."""
    smallest, largest = torch.aminmax(x)
    amax = torch.maximum(-smallest, largest).float().cpu()
    found[name] = torch.maximum(found[name], amax) if name in found else amax
