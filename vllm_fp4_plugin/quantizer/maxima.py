"""Largest magnitudes of tensors, recorded by name."""

import torch
from torch import Tensor

# Floats, not tensors: small tensors that live on, between large freed ones, fragment the heap.
Maxima = dict[str, float]


def raise_maximum(found: Maxima, name: str, x: Tensor) -> None:
    """Update the maximum of ``name`` with max|x|; a NaN in any ``x`` makes the maximum NaN."""
    smallest, largest = torch.aminmax(x)
    amax = torch.maximum(-smallest, largest).abs().item()  # may be -0 for zeros
    before = found.get(name, amax)
    found[name] = before if before >= amax or before != before else amax


def as_tensors(found: Maxima) -> dict[str, Tensor]:
    """Convert the maxima to float32 tensors ``()``."""
    return {name: torch.tensor(amax) for name, amax in found.items()}
