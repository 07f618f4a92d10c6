"""Families beyond Llama in real engines, against transformers' models of their decoded weights.

Bounds are on the mean absolute difference of log-probabilities. With W4A16 and FP8 layers .005 to
.009 was seen; the same models in bfloat16 and in float32 differ by .006 to .008. W4A4 layers turn
small differences into large steps: .13 to .17 was seen, and .12 to .18 between two references with
the same rounding, one in bfloat16 and one in float32.

Each comparison must fail with a mutant reference, whose weight rows are off by one in all layers of
one name: for every name of W4A16 and FP8 layers, and for at least one name with W4A4.
"""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from nvfp4_kernels.formats.nvfp4 import quantize_weight
from tests import limits, preloaded, tiny_llama
from tests.catalogue import checkpoint, reference
from tests.catalogue.facts import FAMILIES
from tests.catalogue.family import Family
from tests.engine import started
from vllm_fp4_plugin.formats.kind import Kind

pytestmark = pytest.mark.slow

SAME = 0.02  # W4A16 and FP8
SAME_W4A4 = 0.25

TEXTS = (tiny_llama.TEXT, 'class Parser:\n    """Read arguments."""\n')
NO_IMAGES = {"limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0}}
BY_NAME = {family.name: family for family in FAMILIES}


def weight_only(family: Family) -> Family:
    """Family with W4A16 in place of W4A4, and a 16-bit KV cache."""
    kinds = {p: Kind.NVFP4_A16 if k is Kind.NVFP4 else k for p, k in family.kinds.items()}
    return replace(family, kinds=kinds, fp8_kv=False)


@dataclass(frozen=True)
class Served:
    """Results of an engine and a reference for the texts.

    Attributes:
        family: family whose checkpoint is served.
        path: directory of the checkpoint.
        found: log-probabilities from the engine, one list for each text.
        model: reference model.
        report: report of the engine.
    """

    family: Family
    path: Path
    found: list[list[float]]
    model: Any
    report: list[str]

    def distance(self) -> float:
        """Mean absolute difference of log-probabilities."""
        expected = reference.logprobs(self.model, tokens())
        pairs = zip(chain(*self.found), chain(*expected), strict=True)
        differences = [abs(a - b) for a, b in pairs]
        return sum(differences) / len(differences)

    def distances_of_mutants(self) -> dict[str, float]:
        """Distances from mutant references with weight rows off by one in layers of one name."""
        linears = [(n, m) for n, m in self.model.named_modules() if isinstance(m, torch.nn.Linear)]
        apart = ("visual", "vision", "projector", "embed_audio")
        mine = [(n.rpartition(".")[2], m) for n, m in linears if not any(a in n for a in apart)]
        distances = {}
        for leaf in dict.fromkeys(leaf for leaf, _ in mine):
            weights = [module.weight.data for each, module in mine if each == leaf]
            for weight in weights:
                weight.copy_(weight.roll(1, 0))
            distances[leaf] = self.distance()
            for weight in weights:
                weight.copy_(weight.roll(-1, 0))
        return distances


def tokens() -> list[list[int]]:
    return [tiny_llama.tokenizer().encode(text) for text in TEXTS]


def auto_class(family: Family) -> Any:
    """Class of transformers that loads the family's models."""
    return AutoModelForImageTextToText if family.multimodal else AutoModelForCausalLM


def settings(family: Family) -> dict[str, Any]:
    """Arguments of an engine that only gets text."""
    if family.surround:
        return NO_IMAGES | {"trust_remote_code": True}
    return NO_IMAGES if family.multimodal else {}


@pytest.fixture
def served(tmp_path: Path) -> Callable[..., Served]:
    def serve(family: Family, **engine_args: Any) -> Served:
        path = checkpoint.write(family, tmp_path / "model", reference.even_out)
        roundings = reference.decode(path, tmp_path / "decoded")
        model = reference.load(auto_class(family), tmp_path / "decoded", roundings)
        found, report = scored(path, **(settings(family) | engine_args))
        return Served(family, path, found, model, report)

    return serve


def scored(path: Path, **engine_args: Any) -> tuple[list[list[float]], list[str]]:
    """Log-probabilities of the texts from an engine, and its report."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    prompts: Any = [{"prompt_token_ids": tokens} for tokens in tokens()]
    with started(str(path), **engine_args) as llm:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        report = llm.llm_engine.vllm_config.quant_config.startup.report.lines()
        del llm
    found = []
    for output in outputs:
        pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        found.append([candidates[token].logprob for candidates, token in pairs])
    return found, report


@dataclass(frozen=True)
class Case:
    """Model family of one test case.

    Attributes:
        family: family whose checkpoint is served.
        bound: largest distance allowed.
        lines: prefixes of lines that the engine's report must contain.
        engine_args: further arguments of the engine.
    """

    family: Family
    bound: float
    lines: tuple[str, ...]
    engine_args: dict[str, Any] = field(default_factory=dict)


QWEN_38 = BY_NAME["Qwen 3.8 (hybrid GDN, vision)"]
NEMOTRON_2 = BY_NAME["Nemotron Nano 2 (Mamba-2 hybrid)"]
W4A4, W4A16 = "nvfp4_gemm/reference (cpu), W4A4", "nvfp4_gemm_w4a16/reference (cpu), W4A16"
FUSED, FP8 = "nvfp4_silu_mul_gemm", "fp8_linear/reference (cpu), W8A8 static"

COMPILED = {"enforce_eager": False}

CASES = {
    "Qwen 3.8, W4A16": Case(
        weight_only(QWEN_38),
        SAME,
        (
            f"in_proj_qkvz ×3: {W4A16}",
            f"out_proj ×3: {W4A16}",
            f"gate_up_proj ×4: {FUSED}_w4a16/reference (cpu), W4A16",
            f"qkv_proj ×1: {W4A16}",
        ),
        COMPILED,
    ),
    "Qwen 3.8": Case(
        QWEN_38,
        SAME_W4A4,
        (
            f"in_proj_qkvz ×3: {W4A4}",
            "in_proj_ba ×3: unquantized (vLLM), 16-bit, ignored by",
            f"gate_up_proj ×4: {FUSED}/reference (cpu), W4A4",
        ),
    ),
    "Qwen 3": Case(
        BY_NAME["Qwen 3 (dense)"],
        SAME_W4A4,
        (f"qkv_proj ×2: {W4A4}", "attn ×2: nvfp4_paged_attention_fp8_kv"),
    ),
    "Qwen 3, compressed-tensors, W4A16": Case(
        weight_only(BY_NAME["Qwen 3 (dense), compressed-tensors"]),
        SAME,
        (f"qkv_proj ×2: {W4A16}",),
    ),
    "Qwen 3.5, compressed-tensors, W4A16": Case(
        weight_only(BY_NAME["Qwen 3.5 (hybrid GDN, vision), compressed-tensors"]),
        SAME,
        ("in_proj_qkvz ×3: unquantized (vLLM), 16-bit, ignored by", f"qkv_proj ×1: {W4A16}"),
    ),
    "Qwen 3.6, mixed": Case(
        BY_NAME["Qwen 3.6 (hybrid GDN, vision), mixed"],
        SAME,
        (f"in_proj_qkvz ×3: {FP8}", f"down_proj ×4: {W4A16}"),
    ),
    "Qwen 3.6, mixed with lm_head": Case(
        BY_NAME["Qwen 3.6 and 3.8 (hybrid GDN, vision), mixed with lm_head"],
        SAME,
        (
            f"in_proj_qkvz ×3: {FP8}",
            f"o_proj ×1: {FP8}",
            f"down_proj ×4: {W4A16}",
            f"lm_head ×1: {W4A16}",
            "attn ×1: nvfp4_paged_attention_fp8_kv",
        ),
    ),
    "Qwen 3.6, mixed with lm_head, in terms": Case(
        BY_NAME["Qwen 3.6 and 3.8 (hybrid GDN, vision), mixed with lm_head"],
        SAME,
        (
            f"in_proj_qkvz ×3: {FP8}",
            f"gate_up_proj ×4: {FUSED}/reference (cpu), W4A4×3 per-token",
            f"down_proj ×4: {W4A4}×3 per-token",
            f"lm_head ×1: {W4A4}×3 per-token",
        ),
        {"additional_config": {"nvfp4_tc": {"activation_terms": 3}}},
    ),
    "Qwen 3.6, mixed compressed-tensors": Case(
        BY_NAME["Qwen 3.6 and 3.8 (hybrid GDN, vision), mixed compressed-tensors"],
        SAME_W4A4,
        (
            "in_proj_qkvz ×3: fp8 (vLLM: CompressedTensorsW8A8Fp8), W8A8 dynamic",
            f"down_proj ×4: {W4A4}",
        ),
    ),
    "Muse Glimmer, W4A16": Case(
        weight_only(BY_NAME["Muse Glimmer"]),
        SAME,
        (
            f"output_gate_proj ×2: {W4A16}",
            "attn ×1: nvfp4_paged_attention/reference (cpu), bfloat16 KV cache, by default; "
            "queries and keys rotated",
        ),
    ),
    "Nemotron Nano 2, W4A16": Case(
        weight_only(NEMOTRON_2),
        SAME,
        (f"in_proj ×1: {W4A16}", f"out_proj ×1: {W4A16}", f"up_proj ×2: {W4A16}"),
        COMPILED,
    ),
    "Nemotron Nano 2": Case(
        NEMOTRON_2,
        SAME_W4A4,
        (
            f"in_proj ×1: {W4A4}",
            f"up_proj ×2: {W4A4}",
            "attn ×1: nvfp4_paged_attention_fp8_kv",
        ),
    ),
    "Nemotron Nano 2 VL": Case(
        BY_NAME["Nemotron Nano 2 VL (Mamba-2 hybrid, vision)"],
        SAME_W4A4,
        (f"in_proj ×1: {W4A4}", f"up_proj ×2: {W4A4}", f"qkv_proj ×1: {W4A4}"),
    ),
    "Gemma 4, W4A16": Case(
        weight_only(BY_NAME["Gemma 4 (dense, vision), compressed-tensors"]),
        SAME,
        (
            "attn ×5: nvfp4_paged_attention/reference (cpu), bfloat16 KV cache, named by",
            "attn ×1: CPU_ATTN (vLLM), bfloat16 KV cache, named by",
            f"qkv_proj ×6: {W4A16}",
            f"gate_up_proj ×6: {W4A16}, not fused: Gemma4MLP.act_fn is GeluAndMul",
        ),
        # Heads of the sliding-window layers have 256 elements, those of the other layers 512.
        {"attention_config": {"backend_per_kind": {"sliding_window": "CUSTOM"}}},
    ),
    "Gemma 4": Case(
        # vLLM's attention has an FP8 cache only on CPUs with AVX-512.
        replace(BY_NAME["Gemma 4 (dense, vision)"], fp8_kv=False),
        SAME_W4A4,
        (
            "attn ×6: CPU_ATTN (vLLM), bfloat16 KV cache, --attention-backend TRITON_ATTN, or",
            f"down_proj ×6: {W4A4}",
        ),
    ),
    "Gemma 4 12B, W4A16": Case(
        weight_only(BY_NAME["Gemma 4 12B (dense, without towers), compressed-tensors"]),
        SAME,
        (
            "attn ×6: CPU_ATTN (vLLM), bfloat16 KV cache, --attention-backend TRITON_ATTN, or",
            f"qkv_proj ×6: {W4A16}",
        ),
    ),
    "Granite 4.2, W4A16": Case(
        weight_only(BY_NAME["Granite 4.2"]),
        SAME,
        (
            f"qkv_proj ×2: {W4A16}",
            f"gate_up_proj ×2: {FUSED}_w4a16/reference (cpu), W4A16",
            "attn ×2: nvfp4_paged_attention/reference (cpu), bfloat16 KV cache, by default",
        ),
    ),
    "Mistral Small 3.2, W4A16": Case(
        weight_only(BY_NAME["Mistral Small 3.2 (vision), compressed-tensors"]),
        SAME,
        (
            f"qkv_proj ×2: {W4A16}",
            "linear_1 ×1: unquantized (vLLM), 16-bit, ignored by",
            "attn ×2: nvfp4_paged_attention/reference (cpu), bfloat16 KV cache, by default",
        ),
    ),
    "Mistral Medium 3.5, mixed": Case(
        BY_NAME["Mistral Medium 3.5 (vision), mixed"],
        SAME_W4A4,
        (f"qkv_proj ×2: {FP8}", f"down_proj ×2: {W4A4}", "attn ×2: nvfp4_paged_attention_fp8_kv"),
    ),
    "Qwen 2.5 VL, W4A16": Case(
        weight_only(BY_NAME["Qwen 2.5 VL"]),
        SAME,
        (f"qkv_proj ×2: {W4A16}", "qkv ×1: unquantized (vLLM), 16-bit, ignored by '*visual*'"),
    ),
    "Nemotron 3 Nano 4B, mixed": Case(
        BY_NAME["Nemotron 3 Nano 4B (Mamba-2 hybrid), mixed"],
        SAME_W4A4,
        (f"in_proj ×1: {FP8}", f"down_proj ×2: {W4A4}", f"lm_head ×1: {FP8}"),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_log_probabilities(case: Case, served: Callable[..., Served]) -> None:
    of = served(case.family, **case.engine_args)
    for line in case.lines:
        assert any(each.startswith(line) for each in of.report), (line, of.report)
    assert of.distance() < case.bound
    mutants = of.distances_of_mutants()
    if case.bound == SAME_W4A4:
        del mutants["lm_head"]
        assert max(mutants.values()) > case.bound
    else:
        assert min(mutants.values()) > case.bound


def test_packed_experts(served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 3.7 stores the experts of a layer in one tensor on disk.

    On CPU vLLM supports sigmoid scores only with grouped routing; one group is equivalent.
    """
    from vllm.model_executor.models import step3p5

    in_a_group = partial(
        step3p5.FusedMoEFactory, use_grouped_topk=True, num_expert_group=1, topk_group=1
    )
    monkeypatch.setattr(step3p5, "FusedMoEFactory", in_a_group)
    of = served(weight_only(BY_NAME["Step 3.7 Flash (experts, vision)"]))
    assert "experts ×1: nvfp4_grouped_silu_mul_gemm_w4a16/reference (cpu), W4A16" in of.report
    assert of.distance() < SAME  # .005 was seen
    experts = next(m for n, m in of.model.named_modules() if n.endswith(".experts"))
    for name in ("gate_up_proj", "down_proj"):
        weights = getattr(experts, name).data
        weights.copy_(weights.roll(1, 0))
        assert of.distance() > SAME
        weights.copy_(weights.roll(-1, 0))


# --- 16-bit checkpoints, quantised at load ------------------------------------------------------

# Rows of the shards that checkpoints store in one tensor; in vLLM each has its own scale.
SHARDS = {"in_proj_qkv": (256, 256, 512), "in_proj": (512, 512, 256, 256, 8)}


@pytest.mark.parametrize("family", [QWEN_38, NEMOTRON_2], ids=["Qwen 3.8", "Nemotron Nano 2"])
def test_quantised_at_load(family: Family, tmp_path: Path) -> None:
    plain = replace(family, kinds={"*": Kind.UNQUANTIZED})
    path = checkpoint.write(plain, tmp_path / "model", reference.even_out)
    file = path / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    ignore = list(weight_only(family).excluded)
    options = {"nvfp4_tc": {"activation": "16-bit", "ignore": ignore}}
    found, report = scored(path, additional_config=options, **settings(family))
    model = reference.load(auto_class(family), path, {})
    for name, module in model.named_modules():
        on_disk = name.removeprefix("model.") if name.startswith("model.visual") else name
        if isinstance(module, torch.nn.Linear) and family.kind(on_disk).is_nvfp4:
            sizes = SHARDS.get(name.rpartition(".")[2], (len(module.weight),))
            shards = [quantize_weight(w).dequantize() for w in module.weight.data.split(sizes)]
            module.weight.data = torch.cat(shards)
    of = Served(family, path, found, model, report)
    assert of.distance() < SAME
    assert min(of.distances_of_mutants().values()) > SAME
    assert sum("W4A16" in line for line in report) == 6  # two each of mixer, MLP and attention


# --- two ranks ----------------------------------------------------------------------------------


ONE_GROUP = replace(weight_only(NEMOTRON_2), config={**NEMOTRON_2.config, "n_groups": 1})


TWO_RANKS = {
    "Qwen 3.8": weight_only(QWEN_38),
    # Both ranks hold a copy of the single group that all heads of a mixer share.
    "Nemotron of one group": ONE_GROUP,
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[float]]]:
    """Decoded checkpoints, and log-probabilities from two-rank engines in a separate process."""
    arguments, decoded = [], {}
    for name, family in TWO_RANKS.items():
        folder = tmp_path_factory.mktemp("ranks")
        path = checkpoint.write(family, folder / "model", reference.even_out)
        decoded[name] = folder / "decoded"
        arguments += [path, json.dumps({"tensor_parallel_size": 2, **settings(family)})]
    environment = {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles a mask even of an eager embedding
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # one memory node, two workers
    }
    done = subprocess.run(
        preloaded.command("tests.engine", "--fork", *arguments), env=os.environ | environment,
        capture_output=True, text=True, check=False, timeout=limits.PROCESS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"log')]
    pairs = zip(decoded.items(), said, strict=True)
    return {name: (path, each["logprobs"]) for (name, path), each in pairs}


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(name: str, two_ranks: dict[str, tuple[Path, list[float]]]) -> None:
    decoded, found = two_ranks[name]
    roundings = reference.decode(decoded.parent / "model", decoded)
    model = reference.load(auto_class(TWO_RANKS[name]), decoded, roundings)
    [expected] = reference.logprobs(model, tokens()[:1])
    pairs = zip(found, expected, strict=True)
    assert sum(abs(a - b) for a, b in pairs) / len(found) < SAME
