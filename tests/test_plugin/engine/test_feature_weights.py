"""Weights replaced in a running engine, which then answers like an engine started on them.

Tensors keep their addresses, as CUDA graphs refer to them.
"""

import gc
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests import tiny_llama
from tests.engine import Run, started
from tests.mixed_checkpoints import write
from vllm_fp4_plugin.attention.impl import PagedAttentionImpl
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

pytestmark = pytest.mark.slow

LAYER = "model.layers.1"
# Methods of the plugin, the formulas of other formats, and vLLM's own method (FP8 per channel).
MIXED = dict.fromkeys(("gate_proj", "up_proj"), Kind.NVFP4_A16) | {
    "q_proj": Kind.FP8_CHANNEL,
    "k_proj": Kind.FP8_CHANNEL,
    "v_proj": Kind.FP8_CHANNEL,
    "o_proj": Kind.FP8_BLOCK,
    "down_proj": Kind.MXFP8,
    "lm_head": Kind.FP8_CHANNEL,
}


@dataclass(frozen=True)
class Pair:
    """Two checkpoints of one architecture."""

    first: Path
    second: Path


def changed(model: Path, path: Path) -> Path:
    """Copy of a 16-bit checkpoint whose matrix elements are changed by about a fifth."""
    shutil.copytree(model, path)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(model / "model.safetensors")
    for name, values in tensors.items():
        noise = torch.randn(values.shape, generator=generator)
        tensors[name] = (values.float() * (1 + 0.2 * noise)).bfloat16()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def qwen(path: Path, seed: int) -> Path:
    """Random Qwen 3 checkpoint, which has query and key norms."""
    shape = tiny_llama.config().to_dict()
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "num_key_value_heads", "vocab_size", "max_position_embeddings", "tie_word_embeddings",
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{name: shape[name] for name in names})).bfloat16()
    tiny_llama.amplify(model)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    tiny_llama.tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def pairs(
    bf16: Path, modelopt: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("pairs")
    other = changed(bf16, folder / "bf16")
    quantize_checkpoint(
        other, folder / "modelopt", calibrate=calibration, seq_len=128, kv_cache_scheme="fp8"
    )
    return {
        "16 bits": Pair(bf16, other),
        "NVFP4": Pair(modelopt, folder / "modelopt"),
        "norms of heads": Pair(qwen(folder / "1", 1), qwen(folder / "2", 2)),
        "mixed precision": Pair(
            write(folder / "first", bf16, modelopt, MIXED, modelopt=True).path,
            write(folder / "second", other, folder / "modelopt", MIXED, modelopt=True).path,
        ),
    }


def ask(engine: Any) -> Run:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0, ignore_eos=True)
    [output] = engine.generate([tiny_llama.TEXT], sampling, use_tqdm=False)
    scored = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    logprobs = [candidates[token].logprob for candidates, token in scored]
    return Run(logprobs, list(output.outputs[0].token_ids), [])


@pytest.fixture(scope="module")
def fresh() -> Callable[[Path], Run]:
    """Function that returns the answer of an engine started on a checkpoint."""
    seen: dict[Path, Run] = {}

    def said(model: Path) -> Run:
        if model not in seen:
            with started(str(model)) as engine:
                seen[model] = ask(engine)
                del engine
        return seen[model]

    return said


@pytest.fixture(autouse=True)
def functions_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


def addresses(worker: Any) -> dict[str, int]:
    """Addresses of the tensors that kernels read, by name."""
    model = worker.model_runner.model
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@contextmanager
def unmoved(engine: Any) -> Iterator[None]:
    before = engine.collective_rpc(addresses)
    yield
    assert engine.collective_rpc(addresses) == before


@pytest.mark.parametrize("kind", ["16 bits", "NVFP4", "norms of heads", "mixed precision"])
@pytest.mark.feature(
    "reload of weights",
    "works",
    "`reload_weights` of NVFP4 tensors (with scales of an FP8 cache) and of 16-bit tensors "
    "(quantised again): bit-identical to a fresh engine, at the same addresses",
)
def test_reload(kind: str, pairs: dict[str, Pair], fresh: Callable[[Path], Run]) -> None:
    pair = pairs[kind]
    expected = {path: fresh(path) for path in (pair.first, pair.second)}
    assert expected[pair.first] != expected[pair.second]
    with started(str(pair.first)) as engine:
        for path in (pair.second, pair.first, pair.first):
            with unmoved(engine):
                engine.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
            assert ask(engine) == expected[path]
        del engine


@pytest.mark.parametrize("kind", ["16 bits", "NVFP4"])
def test_reload_of_fp8_layers(kind: str, pairs: dict[str, Pair]) -> None:
    """Weights are folded again: with a scale per token, and with calibrated scales."""
    option = {"additional_config": {"nvfp4_tc": {"activation": "fp8"}}}
    pair, expected = pairs[kind], {}
    for path in (pair.second, pair.first):
        with started(str(path), **option) as engine:
            expected[path] = ask(engine)
            if path == pair.first:
                for other in (pair.second, pair.first):
                    with unmoved(engine):
                        engine.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
                    assert ask(engine) == expected[other]
            del engine
    assert expected[pair.first] != expected[pair.second]


def test_sinks_stay_where_they_are() -> None:
    """The op reads a float32 copy of the model's sinks; a reload updates the copy in place."""
    sinks = torch.randn(4, dtype=torch.bfloat16)
    impl = PagedAttentionImpl(4, 64, 1.0, 2, sinks=sinks)
    impl.process_weights_after_loading(torch.bfloat16)
    assert impl.sinks is not None
    address = impl.sinks.data_ptr()
    sinks.add_(1)
    impl.process_weights_after_loading(torch.bfloat16)
    assert torch.equal(impl.sinks, sinks.float())
    assert impl.sinks.data_ptr() == address


def chunks(path: Path, count: int = 4) -> list[list[tuple[str, Tensor]]]:
    """Tensors of a checkpoint in several parts, as trainers send them."""
    tensors = list(load_file(path / "model.safetensors").items())
    return [tensors[i::count] for i in range(count)]


def register_trainer() -> None:
    """Register a weight-transfer engine in vLLM that reads tensors from a file."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    @dataclass
    class Start(WeightTransferInitInfo):
        pass

    @dataclass
    class Chunk(WeightTransferUpdateInfo):
        path: str
        number: int

    class FromFile(WeightTransferEngine):
        init_info_cls = Start
        update_info_cls = Chunk

        def init_transfer_engine(self, init_info: Any) -> None:
            pass

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Any) -> None:
            self.model.load_weights(chunks(Path(update_info.path))[update_info.number])

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    if "file" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("file", FromFile)


@pytest.mark.parametrize("kind", ["16 bits", "NVFP4"])
@pytest.mark.feature(
    "online update of weights",
    "works",
    "`start_weight_update`, `update_weights` in four parts, `finish_weight_update`: outputs of "
    "a fresh engine, at the same addresses",
)
def test_online_update(kind: str, pairs: dict[str, Pair], fresh: Callable[[Path], Run]) -> None:
    register_trainer()
    pair = pairs[kind]
    expected = fresh(pair.second)
    with started(str(pair.first), weight_transfer_config={"backend": "file"}) as engine:
        with unmoved(engine):
            engine.collective_rpc("init_weight_transfer_engine", args=({},))
            engine.collective_rpc("start_weight_update")
            for number in range(len(chunks(pair.second))):
                chunk = {"path": str(pair.second), "number": number}
                engine.collective_rpc("update_weights", args=(chunk,))
            engine.collective_rpc("finish_weight_update")
        assert ask(engine) == expected
        del engine


@pytest.mark.feature(
    "online update of weights",
    "refused",
    "16-bit weights for layers that the checkpoint stores in NVFP4; the error names the first "
    "tensor",
)
def test_16_bits_for_nvfp4(pairs: dict[str, Pair]) -> None:
    def update(worker: Any) -> None:
        tensors = load_file(pairs["16 bits"].second / "model.safetensors")
        worker.reload_weights(weights_iterator=tensors.items())

    with started(str(pairs["NVFP4"].first)) as engine:
        with pytest.raises(UnsupportedCheckpoint, match=r"dtype is bfloat16, must be uint8"):
            engine.collective_rpc(update)
        del engine


# --- sleep ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["NVFP4", "norms of heads"])
@pytest.mark.feature(
    "sleep and wake",
    "works",
    "level 2 as on a GPU: every tensor made during loading is overwritten except the model's "
    "buffers, then weights are reloaded; identical outputs",
)
def test_sleep_loses_all_but_buffers(
    kind: str, pairs: dict[str, Pair], fresh: Callable[[Path], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm._custom_ops import CPUDNNLGEMMHandler
    from vllm.model_executor.layers import rotary_embedding
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})  # that of engines before
    load, loaded = CPUModelRunner.load_model, []

    def tensors() -> dict[int, Tensor]:
        return {id(each): each for each in gc.get_objects() if isinstance(each, Tensor)}

    def recorded(self: Any, *args: Any, **named: Any) -> None:
        before = tensors()
        load(self, *args, **named)
        kept = {buffer.data_ptr() for buffer in self.model.buffers()}
        # On some CPUs oneDNN runs vLLM's heads; a tensor holds the address of each handler.
        for each in gc.get_objects():
            if isinstance(each, CPUDNNLGEMMHandler) and each.handler_tensor is not None:
                kept.add(each.handler_tensor.data_ptr())
        new = (each for key, each in tensors().items() if key not in before)
        loaded.extend(t for t in new if t.device.type == "cpu" and t.data_ptr() not in kept)

    path = pairs[kind].first
    expected = fresh(path)
    monkeypatch.setattr(CPUModelRunner, "load_model", recorded)
    with started(str(path)) as engine:
        assert ask(engine) == expected
        for tensor in loaded:
            tensor.detach().untyped_storage().fill_(0x5A)
        assert ask(engine) != expected
        engine.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        assert ask(engine) == expected
        loaded.clear()
        del engine


@pytest.mark.feature(
    "sleep and wake",
    "not in vLLM on a CPU",
    "vLLM refuses `enable_sleep_mode`; `sleep` at levels 1 and 2 stops requests and keeps "
    "memory; identical outputs after `wake_up`",
)
def test_sleep(modelopt: Path, fresh: Callable[[Path], Run]) -> None:
    expected = fresh(modelopt)
    with started(str(modelopt)) as engine:
        for level in (1, 2):
            engine.sleep(level)
            engine.wake_up()
            assert ask(engine) == expected
        del engine
    with pytest.raises(ValueError, match=r"[Ss]leep mode is not supported"):
        started(str(modelopt), enable_sleep_mode=True).__enter__()
