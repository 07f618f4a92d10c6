"""Miniatures of vLLM's registry: each builds, and loads what transformers would write of it."""

from collections.abc import Iterator

import pytest

from tests.registry import checkpoints, configs, session, weights
from tests.registry.session import Session
from tests.registry.unbuilt import ONLY_CPU, UNBUILT

CHECKPOINTS = 95  # classes of transformers' that vLLM has too, at the least
FAULTS = Exception  # whatever a model's code raises for what it cannot do here


@pytest.fixture(scope="module")
def vllm() -> Iterator[Session]:
    with session.started() as running:
        yield running


def test_every_architecture_of_the_registry_builds_or_is_named(vllm: Session) -> None:
    failed: dict[str, str] = {}
    for architecture in configs.architectures():
        try:
            assert len(list(vllm.build(architecture).model.modules())) > 1
        except FAULTS as error:
            failed[architecture] = f"{type(error).__name__}: {error}"
    named = (UNBUILT.keys() | ONLY_CPU.keys()) & set(configs.architectures())
    assert {name: failed[name] for name in failed.keys() - named} == {}
    assert named - failed.keys() == set(), "build now: take them off the list"


def test_checkpoints_as_transformers_writes_them_are_complete(vllm: Session) -> None:
    failed: dict[str, str] = {}
    loaded = 0
    for architecture in filter(checkpoints.is_known, configs.buildable()):
        built = vllm.build(architecture)
        try:
            checkpoints.rehearse(built, checkpoints.tensors(built))
            loaded += 1
        except FAULTS as error:
            failed[architecture] = f"{type(error).__name__}: {error}"
    assert failed == {}
    assert loaded >= CHECKPOINTS


@pytest.mark.parametrize("architecture", ONLY_CPU)
def test_models_that_read_values_while_they_are_built(vllm: Session, architecture: str) -> None:
    assert list(vllm.build(architecture, device="cpu").model.parameters())


@pytest.mark.parametrize("architecture", ["Exaone4ForCausalLM", "Qwen3MoeForCausalLM"])
def test_random_weights_are_the_same_however_layers_are_fused(
    vllm: Session, architecture: str
) -> None:
    both = []
    for fused in (True, False):
        options = {"activation": "16-bit", "fuse_mlp": fused}
        built = vllm.build(
            architecture,
            device="cpu",
            load_format="dummy",
            additional_config={"nvfp4_tc": options},
        )
        weights.load(built)
        both.append(dict(built.model.named_parameters()))
    first, second = both
    assert first.keys() == second.keys()
    alike = [n for n in first if first[n].shape == second[n].shape]
    assert all(first[n].equal(second[n]) for n in alike)
    assert any("qkv_proj" in n for n in alike)
