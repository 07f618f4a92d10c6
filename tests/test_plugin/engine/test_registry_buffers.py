"""Buffers that a checkpoint fills, for every architecture in vLLM's registry that builds here."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config

from tests.registry import checkpoints, configs, session, unbuilt
from vllm_fp4_plugin.checkpoint.arrivals import Checkpoint
from vllm_fp4_plugin.checkpoint.completeness import CompleteLoad
from vllm_fp4_plugin.checkpoint.names import CheckpointNames
from vllm_fp4_plugin.checkpoint.offering import Buffer, wanted
from vllm_fp4_plugin.checkpoint.placeholders import placeholders
from vllm_fp4_plugin.formats import UnsupportedCheckpoint

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

# Errors that models raise for an unknown tensor, or for tensors that did not arrive with it.
ERRORS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, ValueError)
# Architectures whose checkpoints transformers can write, and the tensors that fill buffers there.
FILLED = {
    "Gemma4ForCausalLM": {"model.layers.#.layer_scalar"},
    "EmbeddingGemma2Model": {"language_model.layers.#.layer_scalar"},
}


@pytest.fixture(scope="module")
def vllm() -> Iterator[Any]:
    with session.started() as vllm:
        yield vllm


def built(vllm: Any, architecture: str) -> Any:
    device = "cpu" if architecture in unbuilt.ONLY_CPU else "meta"
    return vllm.build(architecture, device=device)


def kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def dry_load(vllm: Any, architecture: str, tensors: Mapping[str, Tensor]) -> None:
    of = built(vllm, architecture)  # anew: a load on the CPU quantises
    with set_current_vllm_config(of.config):
        load = CompleteLoad(of.model, Checkpoint("m"), has_values=False)
        load(checkpoints.hollow(tensors))


def written(vllm: Any, architecture: str) -> dict[str, Tensor]:
    """Tensors of an architecture's checkpoint; none if transformers lacks the architecture."""
    if not checkpoints.is_known(architecture):
        return {}
    return dict(checkpoints.tensors(built(vllm, architecture)))


def of_each_kind(tensors: Mapping[str, Tensor], buffers: set[str]) -> dict[str, str]:
    """One tensor name of each kind, among tensors whose name ends like some buffer's name."""
    ends = {name.rpartition(".")[2] for name in buffers}
    return {kind(name): name for name in tensors if name.rpartition(".")[2] in ends}


@pytest.fixture(scope="module")
def with_buffers(vllm: Any) -> dict[str, set[str]]:
    """Names of the placeholder buffers of each architecture that has any."""
    found = {}
    architectures = [a for a, *_ in configs.distinct().values() if a not in unbuilt.UNBUILT]
    for architecture in architectures:
        found[architecture] = {n for n, _, _ in placeholders(built(vllm, architecture).model)}
    print(f"{sum(map(bool, found.values()))} of {len(found)} architectures have placeholders")
    assert len(found) > 60
    return {architecture: names for architecture, names in found.items() if names}


def test_a_checkpoint_without_a_buffer_is_refused_by_name(
    vllm: Any, with_buffers: dict[str, set[str]]
) -> None:
    found: dict[str, set[str]] = {}
    for architecture, buffers in with_buffers.items():
        tensors = written(vllm, architecture)
        try:
            dry_load(vllm, architecture, tensors)
        except ERRORS:
            continue  # transformers does not write it, or not as vLLM reads it
        for of_kind, name in of_each_kind(tensors, buffers).items():
            found.setdefault(architecture, set()).add(of_kind)
            for others in ({}, {name: tensors[name].to(torch.int8)}, {name: torch.empty(3, 5)}):
                faulty = {n: t for n, t in tensors.items() if n != name} | others
                with pytest.raises(UnsupportedCheckpoint, match=re.escape(name)):
                    dry_load(vllm, architecture, faulty)
    print(f"checkpoints of {', '.join(found)} without a buffer are refused")
    assert found.items() >= FILLED.items()


def test_every_placeholder_of_the_registry_is_one_that_a_checkpoint_fills(
    vllm: Any, with_buffers: dict[str, set[str]]
) -> None:
    """The names are vLLM's, as in drafts' checkpoints, where transformers writes no checkpoint."""
    for architecture, buffers in with_buffers.items():
        parameters = dict(built(vllm, architecture).model.named_parameters())
        bare = [name.removeprefix("model.") for name in parameters]  # as drafts' checkpoints are
        named = [*parameters, *written(vllm, architecture)]
        taken = [taken_beside(vllm, architecture, came) for came in (named, bare)]
        assert max(taken) == len(buffers), (architecture, buffers)


def taken_beside(vllm: Any, architecture: str, came: list[str]) -> int:
    """Number of buffers that a model takes from a checkpoint with tensors named ``came``."""
    of = built(vllm, architecture)
    names = CheckpointNames(came, dict(of.model.named_parameters()))
    buffers = [Buffer(name, tensor) for name, _, tensor in placeholders(of.model)]
    with set_current_vllm_config(of.config):
        return len(list(wanted(of.model, buffers, names, ERRORS)))
