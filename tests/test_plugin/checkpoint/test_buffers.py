"""Buffers of a model that a checkpoint must fill, and buffers that the model fills by itself."""

from typing import Any

import pytest
import torch

from vllm_fp4_plugin.checkpoint.arrivals import Checkpoint
from vllm_fp4_plugin.checkpoint.completeness import CompleteLoad
from vllm_fp4_plugin.checkpoint.placeholders import Placeholders
from vllm_fp4_plugin.formats import UnsupportedCheckpoint


class Tower(torch.nn.Module):
    """Model with buffers of all kinds, whose loader accepts every buffer."""

    def __init__(self, *, takes_buffers: bool = True, spreads: bool = False) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("bias", torch.empty(4))
        self.register_buffer("scale", torch.zeros(4).to(torch.bfloat16))
        self.register_buffer("ids", torch.arange(4).expand(1, -1))
        mask = torch.zeros(4)
        mask[2:].fill_(1)
        self.register_buffer("mask", mask)
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.takes_buffers, self.spreads = takes_buffers, spreads

    def load_weights(self, weights: Any) -> set[str]:
        places = dict(self.named_parameters())
        if self.takes_buffers:
            places |= dict(self.named_buffers())
        for name, tensor in weights:
            place = places[name.removeprefix("tower.")]
            if not self.spreads:
                assert place.shape == tensor.shape
            place.data.copy_(tensor)
        return set()


FILLED = ("norm.running_mean", "norm.running_var", "bias", "scale")


def tower(device: str, **how: bool) -> tuple[Tower, dict[str, torch.Tensor]]:
    """Tower model, and the tensors that a checkpoint must hold for it."""
    with torch.device(device), Placeholders() as record:
        model = Tower(**how)
    record.keep(model)
    places = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    needed = [*dict(model.named_parameters()), *FILLED]
    return model, {f"tower.{name}": torch.ones(places[name].shape) for name in needed}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_buffers_that_nothing_but_a_checkpoint_fills(device: str) -> None:
    """Positions, a mask and tables belong to the model, though the loader would accept them."""
    model, tensors = tower(device)
    CompleteLoad(model, Checkpoint("m"))(tensors.items())
    for name in FILLED:
        kept = {n: t for n, t in tensors.items() if n != f"tower.{name}"}
        with pytest.raises(UnsupportedCheckpoint, match=f"m: holds no tower.{name}, which the"):
            CompleteLoad(model, Checkpoint("m"))(kept.items())


def test_buffers_that_a_model_takes_from_no_checkpoint() -> None:
    model, tensors = tower("cpu", takes_buffers=False)
    kept = {n: t for n, t in tensors.items() if n.removeprefix("tower.") not in FILLED}
    CompleteLoad(model, Checkpoint("m"))(kept.items())
    assert model.norm.running_var.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("name", ["bias", "proj.weight", "norm.running_var"])
def test_a_number_that_a_loader_would_spread(name: str) -> None:
    model, tensors = tower("cpu", spreads=True)
    tensors[f"tower.{name}"] = torch.ones(1)
    with pytest.raises(UnsupportedCheckpoint, match=rf"m: tower.{name}: shape is \(1,\), must be"):
        CompleteLoad(model, Checkpoint("m"))(tensors.items())


def test_a_load_that_asks_again_leaves_the_model_as_it_was() -> None:
    class Dropping(Tower):
        def load_weights(self, weights: Any) -> set[str]:
            weights = list(weights)
            if len(weights) == 1:
                del self.proj
                self.takes_buffers = False
                raise KeyError(weights[0][0])
            return super().load_weights([(n, t) for n, t in weights if n != "tower.bias"])

    with Placeholders() as record:
        model = Dropping()
    record.keep(model)
    _, tensors = tower("cpu")
    CompleteLoad(model, Checkpoint("m"))(tensors.items())
    assert isinstance(model.proj, torch.nn.Linear)
    assert model.takes_buffers
