"""A model with any tensor missing from the checkpoint is refused; complete models are not."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.model_executor import model_loader
from vllm.model_executor.layers import rotary_embedding

from tests import tiny_llama
from tests.catalogue.common import GEMMA4_TEXT
from tests.engine import run, started
from vllm_fp4_plugin.checkpoint.arrivals import Checkpoint
from vllm_fp4_plugin.checkpoint.completeness import CompleteLoad
from vllm_fp4_plugin.checkpoint.dry_load import dry_load
from vllm_fp4_plugin.checkpoint.files import TensorHeader, read_headers
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.engine import complete_loaders, meta_model, preflight
from vllm_fp4_plugin.formats import UnsupportedCheckpoint

pytestmark = pytest.mark.slow

LAYER = "model.layers.1"
Rehearse = Callable[[dict[str, TensorHeader]], None]


# --- from the headers alone ---------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bf16_checkpoint", "modelopt", "weight_only"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[Any]:
    with meta_model.built(str(checkpoint)) as (model, _):
        yield model


@pytest.fixture
def headers(checkpoint: Path) -> dict[str, TensorHeader]:
    return read_headers(checkpoint)


def without(headers: dict[str, TensorHeader], *dropped: str) -> dict[str, TensorHeader]:
    kept = {name: header for name, header in headers.items() if name not in dropped}
    assert len(kept) == len(headers) - len(dropped)
    return kept


def test_whole_checkpoints_pass(
    model: Any, checkpoint: Path, headers: dict[str, TensorHeader]
) -> None:
    dry_load(model, checkpoint, headers)
    scales = [name for name in headers if name.endswith((".k_scale", ".v_scale"))]
    dry_load(model, checkpoint, without(headers, *scales))  # which are 1 then


def test_every_other_tensor_is_needed(
    model: Any, checkpoint: Path, headers: dict[str, TensorHeader]
) -> None:
    needed = [name for name in headers if not name.endswith((".k_scale", ".v_scale"))]
    assert len(needed) > 20
    for name in needed:
        message = rf"{checkpoint}: holds no {name}, which the model needs; the checkpoint is incom"
        with pytest.raises(UnsupportedCheckpoint, match=message):
            dry_load(model, checkpoint, without(headers, name))


def test_only_some_are_named(
    model: Any, checkpoint: Path, headers: dict[str, TensorHeader]
) -> None:
    layer = [name for name in headers if name.startswith(f"{LAYER}.self_attn.q_proj")]
    others = [f"{LAYER}.input_layernorm.weight", "lm_head.weight", "model.norm.weight"]
    others += ["model.embed_tokens.weight", f"{LAYER}.post_attention_layernorm.weight"]
    more = len(layer) + len(others) - 4
    with pytest.raises(UnsupportedCheckpoint, match=rf"(\S+, ){{3}}\S+ and {more} more, which"):
        dry_load(model, checkpoint, without(headers, *layer, *others))


@pytest.mark.parametrize("name", ["model.norm.weight_scale_2", f"{LAYER}.mlp.down_proj.zero"])
def test_tensors_that_no_parameter_takes(
    name: str, model: Any, checkpoint: Path, headers: dict[str, TensorHeader]
) -> None:
    extra = {name: TensorHeader("F32", (), checkpoint / "model.safetensors")}
    message = rf": holds {name}, for which the model has no parameter; if it belongs to a quantised"
    with pytest.raises(UnsupportedCheckpoint, match=message):
        dry_load(model, checkpoint, extra | headers)


def test_tensors_that_do_not_fit(
    model: Any, checkpoint: Path, headers: dict[str, TensorHeader]
) -> None:
    name = "model.norm.weight"
    headers[name] = TensorHeader("BF16", (7,), headers[name].file)
    message = rf"model\.safetensors: {name}: shape is \(7,\), must be \(128,\); mend"
    with pytest.raises(UnsupportedCheckpoint, match=message):
        dry_load(model, checkpoint, headers)


@pytest.mark.parametrize("longer", [-1, 1], ids=["shorter", "longer"])
def test_a_wrong_shape_is_told_of_the_tensor_in_the_file(
    longer: int, model: Any, checkpoint: Path, headers: dict[str, TensorHeader]
) -> None:
    """Shapes are checked for fused projections too, where vLLM would leave the last row unread."""
    for name, header in headers.items():
        if not header.shape or "embed" in name or name.endswith(("_scale", "_2")):
            continue
        shape = (header.shape[0] + longer, *header.shape[1:])
        wrong = headers | {name: TensorHeader(header.dtype, shape, header.file)}
        message = f"{header.file}: {name}: shape is {shape}, must be {header.shape}; "
        with pytest.raises(UnsupportedCheckpoint, match=re.escape(message)):
            dry_load(model, checkpoint, wrong)


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3", "BOOL", "U8"])
def test_a_norm_of_numbers_of_another_kind(
    dtype: str, model: Any, checkpoint: Path, headers: dict[str, TensorHeader]
) -> None:
    name = "model.norm.weight"
    wrong = headers | {name: TensorHeader(dtype, (128,), headers[name].file)}
    with pytest.raises(UnsupportedCheckpoint, match=rf"{name}: dtype is \w+, must be (a )?float"):
        dry_load(model, checkpoint, wrong)


def test_dtypes_that_vllm_does_not_know(
    model: Any, checkpoint: Path, headers: dict[str, TensorHeader]
) -> None:
    headers["model.norm.weight"] = TensorHeader("F4", (128,), headers["model.norm.weight"].file)
    with pytest.raises(UnsupportedCheckpoint, match=r"norm\.weight: dtype is F4, must be one of"):
        dry_load(model, checkpoint, headers)


def test_a_tied_head_needs_no_tensor(tmp_path: Path) -> None:
    tied = tiny_llama.save(tmp_path, tie_word_embeddings=True)
    headers = read_headers(tied)
    assert "lm_head.weight" not in headers
    with meta_model.built(str(tied)) as (model, _):
        dry_load(model, tied, headers)
        with pytest.raises(UnsupportedCheckpoint, match=r"holds no model\.embed_tokens\.weight"):
            dry_load(model, tied, without(headers, "model.embed_tokens.weight"))


# --- names that a model reports as loaded -------------------------------------------------------


class Claiming(torch.nn.Module):
    """Model that fills half of one parameter and claims to have loaded both."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Parameter(torch.empty(4), requires_grad=False)
        self.other = torch.nn.Parameter(torch.empty(4), requires_grad=False)
        self.said: set[str] | None = {"part", "other"}

    def load_weights(self, weights: Any) -> set[str] | None:
        for _, tensor in weights:
            self.part[:2].copy_(tensor)
        return self.said


def test_a_claim_counts_for_what_is_untouched() -> None:
    model = Claiming()
    load = CompleteLoad(model, Checkpoint("m"))
    with pytest.raises(UnsupportedCheckpoint, match="holds no part, which"):
        load([("part", torch.ones(2))])
    assert load([]) == {"part", "other"}
    model.said = None
    with pytest.raises(UnsupportedCheckpoint, match="holds no part, other, which"):
        load([("part", torch.ones(2))])


def test_only_the_next_load_is_watched() -> None:
    model = Claiming()
    CompleteLoad(model, Checkpoint("m")).expect()
    with pytest.raises(UnsupportedCheckpoint, match="holds no part"):
        model.load_weights([("part", torch.ones(2))])
    model.load_weights([("part", torch.ones(2))])


def test_what_fails_after_the_last_tensor_names_none() -> None:
    class Gathering(Claiming):
        def load_weights(self, weights: Any) -> set[str] | None:
            raise ValueError(f"{len(list(weights))} tensors")

    with pytest.raises(ValueError, match=r"^1 tensors$"):
        CompleteLoad(Gathering(), Checkpoint("m"))([("part", torch.ones(2))])


# --- refused by a worker ------------------------------------------------------------------------


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the checks before the engine starts."""
    monkeypatch.setattr(Nvfp4TcConfig, "maybe_update_config", lambda *_, **__: None)
    monkeypatch.setattr(preflight, "check_complete", lambda *_: None)


def lacking(model: Path, directory: Path, name: str) -> Path:
    copy = shutil.copytree(model, directory / "lacking")
    tensors = load_file(copy / "model.safetensors")
    del tensors[name]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fixture", "name"),
    [
        ("modelopt", f"{LAYER}.post_attention_layernorm.weight"),
        ("modelopt", "model.embed_tokens.weight"),
        ("bf16_checkpoint", f"{LAYER}.self_attn.q_proj.weight"),
        ("bf16_checkpoint", f"{LAYER}.mlp.down_proj.weight"),
    ],
)
def test_an_engine_does_not_start(
    fixture: str, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    copy = lacking(request.getfixturevalue(fixture), tmp_path, name)
    with pytest.raises(UnsupportedCheckpoint, match=f"{copy}: holds no {name}, which"):
        run(str(copy))


@pytest.mark.usefixtures("unchecked")
def test_a_shard_of_an_ignored_layer(bf16_checkpoint: Path, tmp_path: Path) -> None:
    """A missing shard is named although vLLM counts the fused layer as loaded."""
    name = f"{LAYER}.self_attn.k_proj.weight"
    copy = lacking(bf16_checkpoint, tmp_path, name)
    ignore = {"nvfp4_tc": {"ignore": [f"{LAYER}.self_attn"]}}
    with pytest.raises(UnsupportedCheckpoint, match=f"holds no {name}, which"):
        run(str(copy), additional_config=ignore)


@pytest.mark.usefixtures("unchecked")
def test_a_buffer_that_a_worker_misses(tmp_path: Path) -> None:
    """A missing layer scalar would make Gemma 4 multiply a layer's output by 1."""
    path = tmp_path / "whole"
    config = AutoConfig.for_model("gemma4_text", **GEMMA4_TEXT)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    tiny_llama.tokenizer().save_pretrained(path)
    name = "model.layers.1.layer_scalar"
    copy = lacking(path, tmp_path, name)
    with pytest.raises(UnsupportedCheckpoint, match=f"{copy}: holds no {name}, which"):
        run(str(copy))


def test_load_formats_that_check_nothing(bf16_checkpoint: Path) -> None:
    message = "load-format: is sharded_state, must be one of auto, .*safetensors, dummy with nvfp4"
    with pytest.raises(UnsupportedCheckpoint, match=message):
        run(str(bf16_checkpoint), load_format="sharded_state")


def test_registering_twice_changes_nothing() -> None:
    before = dict(model_loader._LOAD_FORMAT_TO_MODEL_LOADER)
    complete_loaders.register()
    assert before == model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    assert before["dummy"] is model_loader.DummyModelLoader


# --- refused by a running engine ------------------------------------------------------------------


@pytest.mark.parametrize("from_disk", [True, False], ids=["disk", "iterator"])
def test_reloads(
    from_disk: bool, bf16_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{LAYER}.self_attn.q_proj.weight"
    copy = lacking(bf16_checkpoint, tmp_path, name)
    before = dict(rotary_embedding._ROPE_DICT)

    def reload(worker: Any) -> None:
        worker.reload_weights(weights_path=str(bf16_checkpoint))
        if from_disk:
            with pytest.raises(UnsupportedCheckpoint, match=f"{copy}: holds no {name}, which"):
                worker.reload_weights(weights_path=str(copy))
        else:
            tensors = load_file(copy / "model.safetensors")
            message = rf"{LAYER}\.self_attn\.qkv_proj\.weight: 16384 of its 32768 elements came"
            with pytest.raises(UnsupportedCheckpoint, match=message):
                worker.reload_weights(weights_iterator=tensors.items())
        assert "load_weights" not in vars(worker.model_runner.model)

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with started(str(bf16_checkpoint)) as llm:
        llm.collective_rpc(reload)
        # The tensors loaded so far are not put to use.
        with pytest.raises((AttributeError, NotImplementedError), match=r"meta|weight_scale"):
            llm.generate(["def"], use_tqdm=False)
    assert before == rotary_embedding._ROPE_DICT  # no later engine gets tensors without values
