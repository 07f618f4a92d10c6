"""Largest magnitudes, by name."""

import torch
from torch import Tensor

# No tensors: small ones that stay, between large ones that go, would scatter the heap.
Maxima = dict[str, float]


def raise_maximum(found: Maxima, name: str, x: Tensor) -> None:
    """Raise the maximum of ``name`` to max|x|; NaN stays."""
    smallest, largest = torch.aminmax(x)
    amax = torch.maximum(-smallest, largest).abs().item()  # of zeros that is -0
    before = found.get(name, amax)
    found[name] = before if before >= amax or before != before else amax


def as_tensors(found: Maxima) -> dict[str, Tensor]:
    """Make float32 ``()`` of the maxima."""
    return {name: torch.tensor(amax) for name, amax in found.items()}
