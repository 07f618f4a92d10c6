"""Refusals of the front-end process, before it starts a worker."""

import os
import shutil
import time
from pathlib import Path

import psutil
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from vllm_fp4_plugin.checkpoint import files as checkpoint_files
from vllm_fp4_plugin.engine import meta_model, preflight, refusal
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.options import InvalidOption

pytestmark = pytest.mark.slow

NORM = "model.layers.1.post_attention_layernorm.weight"


@pytest.fixture(autouse=True, scope="module")
def plugins() -> None:
    load_general_plugins()


def config(model: Path | str, **args: object) -> object:
    args = {"quantization": "nvfp4-tc", "enforce_eager": True, **args}
    return EngineArgs(model=str(model), **args).create_engine_config()  # type: ignore[arg-type]


def lacking(model: Path, directory: Path, *names: str) -> Path:
    copy = shutil.copytree(model, directory / "lacking")
    tensors = load_file(copy / "model.safetensors")
    for name in names:
        del tensors[name]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("fixture", ["modelopt", "bf16_checkpoint"])
def test_a_missing_tensor(fixture: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model = request.getfixturevalue(fixture)
    config(model)
    copy = lacking(model, tmp_path, NORM)
    with pytest.raises(UnsupportedCheckpoint, match=f"{copy}: holds no {NORM}, which the model"):
        config(copy)


def test_for_any_number_of_ranks(modelopt: Path, tmp_path: Path) -> None:
    copy = lacking(modelopt, tmp_path, NORM)
    with pytest.raises(UnsupportedCheckpoint, match=f"holds no {NORM}, which"):
        config(copy, tensor_parallel_size=2)


@pytest.mark.parametrize("quantization", ["nvfp4-tc", None])  # None: told by the checkpoint
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nvfp4_tc": {"fuse": True}}, r"^nvfp4_tc\.fuse: is unknown"),
        ({"nvfp4_tc": {"fuse_mlp": 1}}, r"^nvfp4_tc\.fuse_mlp: is 1, must be"),
        ({"nvfp4_tc": ["fuse_mlp"]}, r"^nvfp4_tc: is \['fuse_mlp'\], must be an object"),
        ({"fuse_mlp": False}, "^additional-config: has 'fuse_mlp' beside 'nvfp4_tc', must be"),
        ({"ignore": ["lm_head"]}, "^additional-config: has 'ignore' beside"),
    ],
)
def test_options_are_refused_whoever_names_the_method(
    quantization: str | None, given: dict[str, object], message: str, modelopt: Path
) -> None:
    with pytest.raises(InvalidOption, match=message):
        config(modelopt, quantization=quantization, additional_config=given)


@pytest.mark.parametrize("quantization", ["nvfp4-tc", None])
def test_a_hub_that_cannot_be_reached(
    quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM's own error, which other engines get, does not name the model."""

    def unreachable(*_: object, **__: object) -> None:
        raise LocalEntryNotFoundError("check your connection")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", unreachable)
    with pytest.raises((UnsupportedCheckpoint, OSError)) as refused:
        config("org/absent", quantization=quantization)
    line = refusal.cause(refused.value)
    if quantization is None:
        assert line == ""
    else:
        assert line.startswith("org/absent: is no directory, its config.json is not in the hub's ")
        assert f"{constants.ENDPOINT} cannot be reached; download it with `hf download org" in line


def test_dummy_weights_need_no_tensors(modelopt: Path, tmp_path: Path) -> None:
    config(lacking(modelopt, tmp_path, NORM), load_format="dummy")


def test_registering_twice_checks_once(monkeypatch: pytest.MonkeyPatch, modelopt: Path) -> None:
    checked = []
    monkeypatch.setattr(preflight, "check_complete", lambda _, path: checked.append(path))
    preflight.register()
    config(modelopt)
    assert checked == [modelopt]


def test_models_that_never_run_are_not_checked(
    monkeypatch: pytest.MonkeyPatch, modelopt: Path
) -> None:
    monkeypatch.setattr(preflight, "check_complete", lambda *_: pytest.fail("checked"))
    with meta_model.built(str(modelopt)):
        pass


def test_what_only_the_check_meets_is_said(modelopt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that the check cannot build is left to the engine, which then checks the weights."""

    def failing(*_: object) -> None:
        raise RuntimeError("no such device")

    said: list[str] = []
    monkeypatch.setattr(meta_model, "built_for", failing)
    monkeypatch.setattr(preflight.logger, "info", lambda line, *args: said.append(line % args))
    config(modelopt)
    [line] = said
    assert line.endswith("checked once its weights are read (RuntimeError: no such device)")


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_SECONDS", 0.2)
    before = psutil.Process().children()
    said = preflight._in_a_child(lambda: time.sleep(60) or b"")  # type: ignore[func-returns-value]
    assert said.endswith(b"took more than 0.2 s")
    assert psutil.Process().children() == before


def test_a_child_needs_no_threads_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parallel ops end in the child of a process in which an engine has bound the threads."""
    before, x = torch.get_num_threads(), torch.ones(1 << 20)
    torch.set_num_threads(2)
    try:
        assert x.add(1).sum() == 1 << 21  # starts the parent's threads
        with monkeypatch.context() as patch:
            patch.setattr(torch, "set_num_threads", lambda number: None)  # as vLLM does
            patch.setattr(preflight, "_SECONDS", 20)
            verdict = preflight._in_a_child(lambda: f"{x.add(1).sum():.0f}".encode())
    finally:
        torch.set_num_threads(before)
    assert verdict == str(1 << 21).encode()


def test_a_child_that_dies_is_no_pass() -> None:
    assert preflight._in_a_child(lambda: os._exit(3)).startswith(b"F")


# --- names on the hub ---------------------------------------------------------------------------


def test_the_hubs_cache_is_read_if_it_holds_all(modelopt: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / "abc"
    shutil.copytree(modelopt, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    found = checkpoint_files.local_directory("some/model", cache=str(tmp_path))
    assert found == snapshot
    (snapshot / "model.safetensors").unlink()
    assert checkpoint_files.local_directory("some/model", cache=str(tmp_path)) is None
    assert checkpoint_files.local_directory("other/model", cache=str(tmp_path)) is None
    assert checkpoint_files.local_directory("no name at all/x/y", cache=str(tmp_path)) is None
