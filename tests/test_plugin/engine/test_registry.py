"""Scaled-down models of vLLM's registry: each builds, and loads tensors saved by transformers."""

from collections.abc import Iterator

import pytest

from tests.registry import checkpoints, configs, session, weights
from tests.registry.session import Session
from tests.registry.text import ROPE
from tests.registry.unbuilt import ONLY_CPU, UNBUILT

CHECKPOINTS = 95  # classes of transformers' that vLLM has too, at the least
FAULTS = Exception  # whatever a model's code raises for what it cannot do here


@pytest.fixture(scope="module")
def vllm() -> Iterator[Session]:
    with session.started() as running:
        yield running


@pytest.mark.thorough
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
    # The default backend serves, whatever else is missing.
    assert [name for name, error in failed.items() if "UnsupportedAttention" in error] == []


def test_latent_attention_that_vllm_does_not_tell_is_left_to_it(
    vllm: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_fp4_plugin.attention import choice

    assert vllm.build("SarvamMLAForCausalLM").config.attention_config.backend is None
    monkeypatch.setattr(choice, "_LATENT", ())
    with pytest.raises(ValueError, match=r"is CUSTOM, which cannot serve a layer: .*MLA not supp"):
        vllm.build("SarvamMLAForCausalLM")


def test_chunks_with_lookback_are_left_to_vllm(
    vllm: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusals name vLLM's own CPU backend; the plugin's is not chosen for such layers."""
    from vllm_fp4_plugin.attention import choice

    kinds = ["chunked_attention", "full_attention"]
    chunks = {"layer_types": kinds, "rope_parameters": dict.fromkeys(kinds, ROPE)}
    with pytest.raises(
        AssertionError, match="lookback requires the Triton backend, but got CPU_ATTN"
    ):
        vllm.build("Rnj1ForCausalLM", changes=chunks)
    monkeypatch.setattr(choice, "_LOOKING_BACK", ())
    with pytest.raises(AssertionError, match="but got CUSTOM"):
        vllm.build("Rnj1ForCausalLM", changes=chunks)


@pytest.mark.processes
def test_checkpoints_as_transformers_writes_them_are_complete(vllm: Session) -> None:
    failed: dict[str, str] = {}
    loaded = 0
    for architecture in filter(checkpoints.is_known, configs.buildable()):
        built = vllm.build(architecture)
        try:
            checkpoints.dry_load(built, checkpoints.tensors(built))
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
