"""Drafts of speculative decoding in real engines: heads in the target's checkpoint, and models.

The generated tokens must be the target's greedy choice, according to transformers' model of the
decoded weights. A draft in NVFP4 must propose the same tokens as a draft with the same values in 16
bits.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from nvfp4_kernels.formats.nvfp4 import quantize_weight
from tests import tiny_llama
from tests.catalogue import checkpoint, reference
from tests.catalogue.facts import named
from tests.engine import started
from tests.test_plugin.engine.test_model_families import NO_IMAGES, QWEN_38, tokens, weight_only

pytestmark = pytest.mark.slow

# Most by which the target's best token may exceed the generated one in log-probability: closer
# tokens count as tied, and rounding decides.
TIE = 0.05
ALIKE = 0.9  # part of proposals that two drafts of the same values share
HIDDEN = 128


@dataclass(frozen=True)
class Drafted:
    """Tokens and report of an engine with a draft.

    Attributes:
        generated: token ids that the engine generated, one list for each text.
        proposed: token ids that the draft proposed, in order.
        report: report of the engine.
        methods: classes of the methods of the draft's layers, by the last parts of their names.
    """

    generated: list[list[int]]
    proposed: list[int]
    report: list[str]
    methods: dict[str, str]


def proposer_class() -> Any:
    """Class of vLLM that proposes tokens; GPUs have a separate model runner."""
    if torch.cuda.is_available():
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
            TargetDependentARSpeculator,
        )

        return TargetDependentARSpeculator
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    return SpecDecodeBaseProposer


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Drafted]:
    from vllm import SamplingParams

    proposer = proposer_class()
    propose = proposer.propose
    drafts: list[Any] = []
    proposed: list[int] = []

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = propose(self, *args, **kwargs)
        drafts.append(self.model)
        if not kwargs.get("dummy_run"):
            proposed.extend(tokens.flatten().tolist())
        return tokens

    monkeypatch.setattr(proposer, "propose", recorded)

    def run(target: Path, **engine_args: Any) -> Drafted:
        proposed.clear()
        sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in tokens()]
        with started(str(target), **engine_args) as llm:
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            report = llm.llm_engine.vllm_config.quant_config.startup.report.lines()
            methods = {
                name.rpartition(".")[2]: type(module.quant_method).__name__
                for name, module in drafts[-1].named_modules()
                if hasattr(module, "quant_method")
            }
            drafts.clear()
            del llm
        generated = [list(output.outputs[0].token_ids) for output in outputs]
        return Drafted(generated, list(proposed), report, methods)

    return run


def worst(model: Any, generated: list[list[int]]) -> float:
    """Largest gap in log-probability between a model's best token and the generated token."""
    gaps = []
    for prompt, continuation in zip(tokens(), generated, strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + continuation])).logits[0]
        scores = logits[len(prompt) - 1 : -1].log_softmax(-1)
        chosen = scores.gather(-1, torch.tensor(continuation)[:, None])[:, 0]
        gaps.append(float((scores.amax(-1) - chosen).max()))
    return max(gaps)


def share(a: Drafted, b: Drafted) -> float:
    """Fraction of proposed tokens that two drafts have in common."""
    return sum(x == y for x, y in zip(a.proposed, b.proposed, strict=False)) / len(a.proposed)


def stored(name: str, weight: Tensor, *, nvfp4: bool) -> dict[str, Tensor]:
    """Tensors on disk of a weight: in NVFP4, or of the same values in 16 bits."""
    w = quantize_weight(weight.float())
    if not nvfp4:
        return {f"{name}.weight": w.dequantize().bfloat16()}
    tensors = {"weight": w.data, "weight_scale": w.scales, "weight_scale_2": w.global_scale}
    return {f"{name}.{part}": tensor for part, tensor in tensors.items()}


def random(n: int, k: int) -> Tensor:
    return (torch.randn(n, k, dtype=torch.float32) * k**-0.5).bfloat16()


def linears(layer: str, *, q: int, kv: int, o: int, k: int) -> dict[str, Tensor]:
    """Weights of a decoder layer.

    ``q``, ``kv``: rows of q_proj, and of k_proj and v_proj; ``k``: their columns; ``o``: columns of
    o_proj.
    """
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    return {
        f"{attention}.q_proj": random(q, k),
        f"{attention}.k_proj": random(kv, k),
        f"{attention}.v_proj": random(kv, k),
        f"{attention}.o_proj": random(HIDDEN, o),
        f"{mlp}.gate_proj": random(256, HIDDEN),
        f"{mlp}.up_proj": random(256, HIDDEN),
        f"{mlp}.down_proj": random(HIDDEN, 256),
    }


def change_config(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


# --- heads in the target's checkpoint -----------------------------------------------------------


def with_head(target: Path, directory: Path, *, nvfp4: bool, listed: bool) -> Path:
    """Copy of a Qwen 3.8 checkpoint with a multi-token-prediction head.

    ``nvfp4``: whether the head is NVFP4; ``listed``: whether the exclude list names the head.
    """
    shutil.copytree(target, directory)
    torch.manual_seed(5)
    tensors = load_file(directory / "model.safetensors")
    layer = "mtp.layers.0"
    for name, weight in linears(layer, q=2048, kv=512, o=1024, k=HIDDEN).items():
        tensors |= stored(name, weight, nvfp4=nvfp4)
    tensors["mtp.fc.weight"] = random(HIDDEN, 2 * HIDDEN)
    norms = dict.fromkeys(("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"), HIDDEN)
    around = ("input_layernorm", "post_attention_layernorm")
    norms |= dict.fromkeys((f"layers.0.{norm}" for norm in around), HIDDEN)
    norms |= dict.fromkeys((f"layers.0.self_attn.{norm}" for norm in ("q_norm", "k_norm")), 256)
    for name, size in norms.items():
        tensors[f"mtp.{name}.weight"] = torch.zeros(size, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    def change(config: dict[str, Any]) -> None:
        config["text_config"]["mtp_num_hidden_layers"] = 1
        if listed:
            config["quantization_config"]["ignore"].append("mtp*")

    change_config(directory, change)
    return directory


@pytest.mark.feature(
    "MTP heads",
    "works",
    "Qwen 3.8's MTP layer in 16 bits and in NVFP4: output tokens are the target's, both propose "
    "nearly the same tokens",
)
def test_heads_of_the_target(tmp_path: Path, drafted: Callable[..., Drafted]) -> None:
    """Heads are in NVFP4, or in 16 bits with or without an entry in the exclude list."""
    target = checkpoint.write(weight_only(QWEN_38), tmp_path / "target", reference.even_out)
    roundings = reference.decode(target, tmp_path / "decoded")
    model = reference.load(AutoModelForImageTextToText, tmp_path / "decoded", roundings)
    engine_args = {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
        "gdn_prefill_backend": "triton",  # by default a Hopper needs FlashInfer
    }
    runs = {
        name: drafted(with_head(target, tmp_path / name, **how), **NO_IMAGES, **engine_args)
        for name, how in {
            "listed": {"nvfp4": False, "listed": True},
            "unlisted": {"nvfp4": False, "listed": False},
            "nvfp4": {"nvfp4": True, "listed": False},
        }.items()
    }
    for name, run in runs.items():
        assert worst(model, run.generated) < TIE, name
        assert share(run, runs["listed"]) > ALIKE, name
        if not torch.cuda.is_available():  # a GPU's model runner applies the target's choice
            assert any("KV cache, vLLM's choice for the draft" in line for line in run.report)
    others = [[token + 1 for token in text] for text in runs["listed"].generated]
    assert worst(model, others) > TIE
    for name, method in {
        "listed": "UnquantizedLinearMethod",
        "unlisted": "UnquantizedLinearMethod",
        "nvfp4": "Nvfp4LinearMethod",
    }.items():
        assert runs[name].methods["down_proj"] == runs[name].methods["qkv_proj"] == method
        assert runs[name].methods["fc"] == "UnquantizedLinearMethod"
    unlisted = "unquantized (vLLM), 16-bit, 16-bit in the checkpoint, whose config says NVFP4"
    assert any(f"o_proj ×1: {unlisted}" in line for line in runs["unlisted"].report)


# --- models apart -------------------------------------------------------------------------------


def eagle(
    target: Path, directory: Path, *, nvfp4: bool, plain: tuple[str, ...] = (), seed: int = 5
) -> Path:
    """EAGLE 3 draft for a Llama with its own exclude list; ``plain`` parts are in 16 bits too."""
    directory.mkdir()
    torch.manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in linears("midlayer", q=512, kv=256, o=512, k=2 * HIDDEN).items():
        tensors |= stored(name, weight, nvfp4=nvfp4 and not any(part in name for part in plain))
    tensors |= {"fc.weight": random(HIDDEN, 2 * HIDDEN), "lm_head.weight": random(320, HIDDEN)}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for name in ("norm", *(f"midlayer.{norm}" for norm in norms)):
        tensors[f"{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(target / "config.json", directory)
    tiny_llama.tokenizer().save_pretrained(directory)

    def change(config: dict[str, Any]) -> None:
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": config["vocab_size"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
        }
        if nvfp4:
            config["quantization_config"]["ignore"] = ["fc", "lm_head", *plain]
        else:
            del config["quantization_config"]

    change_config(directory, change)
    return directory


@pytest.mark.feature(
    "EAGLE",
    "works",
    "EAGLE 3 draft in 16 bits, NVFP4 and mixed: output tokens are the target's, all propose nearly "
    "the same tokens; on a GPU pass "
    '`--speculative-config \'{"quantization": "nvfp4-tc", …}\'`',
)
def test_models_apart(tmp_path: Path, drafted: Callable[..., Drafted]) -> None:
    """Drafts are in 16 bits and in NVFP4; their names on disk differ from vLLM's layers."""
    target = checkpoint.write(
        weight_only(named("Llama 3")), tmp_path / "target", reference.even_out
    )
    roundings = reference.decode(target, tmp_path / "decoded")
    model = reference.load(AutoModelForCausalLM, tmp_path / "decoded", roundings)

    asked = {"quantization": "nvfp4-tc"}
    unasked = asked if torch.cuda.is_available() else {}  # on a GPU vLLM takes what is unasked

    def speculate(draft: Path, more: dict[str, str]) -> Drafted:
        settings = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3}
        return drafted(target, speculative_config=settings | more)

    plain = speculate(eagle(target, tmp_path / "plain", nvfp4=False), {})
    nvfp4 = speculate(eagle(target, tmp_path / "nvfp4", nvfp4=True), unasked)
    draft = eagle(target, tmp_path / "mixed", nvfp4=True, plain=("midlayer.self_attn",))
    mixed = speculate(draft, unasked)
    other = speculate(eagle(target, tmp_path / "other", nvfp4=True, seed=6), asked)
    for run in (plain, nvfp4, mixed, other):
        assert worst(model, run.generated) < TIE
        assert run.methods["fc"] == "UnquantizedLinearMethod"
    assert plain.methods["down_proj"] == "UnquantizedLinearMethod"
    assert nvfp4.methods["qkv_proj"] == nvfp4.methods["down_proj"] == "Nvfp4LinearMethod"
    assert mixed.methods["qkv_proj"] == mixed.methods["o_proj"] == "UnquantizedLinearMethod"
    assert mixed.methods["down_proj"] == "Nvfp4LinearMethod"
    assert share(plain, mixed) > ALIKE
    assert share(plain, nvfp4) > ALIKE > share(plain, other)
