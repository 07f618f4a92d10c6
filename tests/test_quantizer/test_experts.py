"""Mixtures of experts: tensors, input scales and configs of families that transformers builds."""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GptOssConfig,
    GraniteMoeConfig,
    HunYuanMoEV1Config,
    JetMoeConfig,
)

from nvfp4_kernels.formats.nvfp4 import GLOBAL_RANGE
from nvfp4_kernels.formats.scale_search import quantize_with_rule
from tests import moe_checkpoints
from tests.test_quantizer.checkpoints import read_config, read_tensors, save_checkpoint
from tests.test_quantizer.mixtures import FAMILIES, SIZES, llama4, save_mixture, stack
from vllm_fp4_plugin.ignore import matches
from vllm_fp4_plugin.quantizer import calibration, expert_calibration
from vllm_fp4_plugin.quantizer.calibration_text import read_sequences
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint
from vllm_fp4_plugin.quantizer.errors import QuantizerError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Gemma 4": partial(F.gelu, approximate="tanh"),
    "Nemotron-H": lambda x: F.relu(x).square(),
}
LAST = ("down_proj", "w2")
UP = ("up_proj", "w3")
CALIBRATION: dict[str, Any] = {"seq_len": 64, "calibration_tokens": 512}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen 3 with single experts; read-only."""
    return save_mixture(tmp_path_factory.mktemp("qwen3") / "src", moe_checkpoints.qwen3())


@pytest.fixture(scope="module")
def stacked(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen 3 with stacks of experts; read-only."""
    folder = Path(shutil.copytree(qwen3, tmp_path_factory.mktemp("stacked") / "src"))
    stack(folder)
    return folder


def load(src: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(src, dtype=torch.bfloat16).eval()


def name_in_model(name: str) -> str:
    """Name in the model of a module of the checkpoint."""
    return name.replace("backbone.", "model.", 1).replace("block_sparse_moe", "mlp")


def expert_weight(model: Any, name: str) -> Tensor:
    """Weight in a loaded model for the linear ``name`` of the quantised checkpoint."""
    layer, number, projection = name_in_model(name).rsplit(".", 2)
    module = model.get_submodule(layer)
    if projection in LAST:
        weight = module.down_proj[int(number)]
    elif hasattr(module, "gate_up_proj"):
        both = module.gate_up_proj[int(number)]
        both = both.mT if "Llama4" in type(module).__name__ else both
        return both.chunk(2)[projection in UP].contiguous()
    else:
        weight = module.up_proj[int(number)]
    return (weight.mT if "Llama4" in type(module).__name__ else weight).contiguous()


def quantized_in(folder: Path) -> list[str]:
    names = read_tensors(folder)
    return [n.removesuffix(".weight_scale") for n in names if n.endswith(".weight_scale")]


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_and_config(family: str, tmp_path: Path) -> None:
    """Weights are bit-identical to the library's; other tensors are copied and listed."""
    src = save_mixture(tmp_path / "src", FAMILIES[family]())
    summary = quantize_checkpoint(src, tmp_path / "dst")

    model = load(src)
    before, after = read_tensors(src), read_tensors(tmp_path / "dst")
    names = quantized_in(tmp_path / "dst")
    experts = [name for name in names if ".experts." in name]
    for name in names:
        weight = expert_weight(model, name) if name in experts else before[f"{name}.weight"]
        expected = quantize_with_rule(weight.detach(), "absmax", convention="modelopt")
        assert torch.equal(after[f"{name}.weight"], expected.data)
        assert torch.equal(after[f"{name}.weight_scale"].float(), expected.scales.float())
        amax = weight.detach().abs().max().float()
        assert torch.equal(after[f"{name}.weight_scale_2"], amax / GLOBAL_RANGE)
    stacks = [
        m for n, m in model.named_modules() if hasattr(m, "down_proj") and n[-7:] == "experts"
    ]
    layers = [m for m in stacks if isinstance(m.down_proj, torch.nn.Parameter)]
    each = 3 if hasattr(layers[0], "gate_up_proj") else 2
    assert len(experts) == sum(each * len(m.down_proj) for m in layers)
    assert summary.quantized == len(names)

    ignore = read_config(tmp_path / "dst")["quantization_config"]["ignore"]
    for name, tensor in before.items():
        module = name.removesuffix(".weight")
        if module in names or ".experts." in name:
            continue
        assert torch.equal(after[name], tensor)
        if tensor.ndim == 2 and "embed" not in name:
            assert matches(module, ignore) or "conv" in name, name
    assert not [name for name in names if matches(name, ignore)]


class Oracle:
    """Completely loaded model that runs all experts on every token and records input ranges."""

    def __init__(self, src: Path, family: str):
        self.model = load(src)
        self.found: dict[str, Tensor] = {}
        self.activation = ACTIVATIONS.get(family, F.silu)
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(
                    lambda m, args, name=name: self.note(name, args[0])
                )
            if type(module).__name__ == "Llama4TextMoe":
                module.forward = partial(self.block, module, f"{name}.experts")
            elif hasattr(module, "has_gate"):
                module.forward = partial(self.experts, module, name, module.forward)

    def note(self, name: str, x: Tensor) -> None:
        largest = x.abs().max().float()
        self.found[name] = torch.maximum(self.found.get(name, largest), largest)

    def expert(self, name: str, x: Tensor, first: Tensor, last: Tensor) -> Tensor:
        projected = F.linear(x, first)
        if len(first) == last.shape[1]:
            hidden = self.activation(projected)
        else:
            gate, up = projected.chunk(2, -1)
            hidden = self.activation(gate) * up
        self.note(f"{name}.last", hidden)
        return F.linear(hidden, last)

    def experts(
        self, module: Any, name: str, own: Any, x: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        self.note(f"{name}.first", x)
        first = getattr(module, "gate_up_proj", None)
        first = module.up_proj if first is None else first
        total = torch.zeros(x.shape)
        for number in range(len(first)):
            y = self.expert(f"{name}.{number}", x, first[number], module.down_proj[number])
            for slot in range(index.shape[1]):
                chosen = index[:, slot] == number
                total[chosen] += (y[chosen] * weights[chosen, slot, None]).float()
        torch.testing.assert_close(total, own(x, index, weights).float(), rtol=0.03, atol=0.03)
        return total.to(x.dtype)

    def block(self, block: Any, name: str, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden.reshape(-1, hidden.shape[-1])
        logits = F.linear(x, block.router.weight)
        routed = torch.zeros(x.shape)
        for number in range(logits.shape[1]):
            weighed = x * logits[:, number, None].float().sigmoid().bfloat16()
            self.note(f"{name}.first", weighed)
            stacks = (block.experts.gate_up_proj[number].mT, block.experts.down_proj[number].mT)
            y = self.expert(f"{name}.{number}", weighed, *map(Tensor.contiguous, stacks))
            chosen = logits.argmax(-1) == number
            routed[chosen] += y[chosen].float()
        out = block.shared_expert(x) + routed.bfloat16()
        expected, _ = type(block).forward(block, hidden)
        torch.testing.assert_close(out, expected, rtol=0.03, atol=0.03)
        return out, logits

    def largest(self, name: str) -> Tensor:
        """Recorded max|input| for a linear of the quantised checkpoint."""
        name = name_in_model(name)
        if ".experts." not in name:
            return self.found[name]
        layer, number, projection = name.rsplit(".", 2)
        last = projection in LAST
        return self.found[f"{layer}.{number}.last" if last else f"{layer}.first"]


@pytest.mark.processes
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_input_scales_are_of_every_token_through_every_expert(
    family: str, text: Path, tmp_path: Path
) -> None:
    src = save_mixture(tmp_path / "src", FAMILIES[family]())
    quantize_checkpoint(src, tmp_path / "dst", calibrate=text, **CALIBRATION)

    oracle = Oracle(src, family)
    oracle.model(read_sequences(text, AutoTokenizer.from_pretrained(src), 512, 64), use_cache=False)
    after = read_tensors(tmp_path / "dst")
    names = quantized_in(tmp_path / "dst")
    found = {name: after[f"{name}.input_scale"].item() for name in names}
    for name, scale in found.items():
        assert scale == (oracle.largest(name) / GLOBAL_RANGE).item(), name
    experts = [name for name in names if ".experts." in name]
    assert len({found[name] for name in experts if name.endswith(LAST)}) > 3


def test_few_tokens_at_once_give_the_same_scales(
    qwen3: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_checkpoint(qwen3, tmp_path / "whole", calibrate=text, **CALIBRATION)
    monkeypatch.setattr(expert_calibration, "_PIECE_TOKENS", 96)
    quantize_checkpoint(qwen3, tmp_path / "pieces", calibrate=text, **CALIBRATION)
    whole, pieces = read_tensors(tmp_path / "whole"), read_tensors(tmp_path / "pieces")
    for name in (name for name in whole if name.endswith(".input_scale")):
        torch.testing.assert_close(pieces[name], whole[name], rtol=0.02, atol=0)


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_stacks_become_what_single_experts_become(
    qwen3: Path, stacked: Path, text: Path, tmp_path: Path, format: str
) -> None:
    for src, dst in ((qwen3, "single"), (stacked, "stacked")):
        quantize_checkpoint(src, tmp_path / dst, format=format, calibrate=text, **CALIBRATION)
    single, other = read_tensors(tmp_path / "single"), read_tensors(tmp_path / "stacked")
    assert single.keys() == other.keys()
    assert all(torch.equal(_bits(tensor), _bits(other[name])) for name, tensor in single.items())
    assert read_config(tmp_path / "single") == read_config(tmp_path / "stacked")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def test_gate_and_up_share_a_scale_on_demand(qwen3: Path, tmp_path: Path) -> None:
    for option in ({}, {"shared_gate_up_scale": True}, {"shared_fused_scale": True}):
        dst = tmp_path / "-".join(["dst", *option])
        quantize_checkpoint(qwen3, dst, **option)
        tensors = read_tensors(dst)
        expert = "model.layers.1.mlp.experts.3"
        gate, up = (tensors[f"{expert}.{n}_proj.weight_scale_2"] for n in ("gate", "up"))
        q, k = (tensors[f"model.layers.1.self_attn.{n}_proj.weight_scale_2"] for n in "qk")
        before = read_tensors(qwen3)
        own = [before[f"{expert}.{n}_proj.weight"].abs().max().float() for n in ("gate", "up")]
        assert own[0] != own[1]
        assert (gate == up) == bool(option)
        assert (q == k) == ("shared_fused_scale" in option)
        if option:
            assert gate == max(own) / GLOBAL_RANGE


@pytest.mark.parametrize("calibrated", [False, True], ids=["weight-only", "calibrated"])
@pytest.mark.parametrize("source", ["qwen3", "stacked"])
def test_a_layer_of_experts_is_kept(
    source: str, calibrated: bool, text: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    src = request.getfixturevalue(source)
    options = {"calibrate": text, **CALIBRATION} if calibrated else {}
    summary = quantize_checkpoint(src, tmp_path / "dst", ignore=["layers.1.mlp"], **options)

    names = [name for name in quantized_in(tmp_path / "dst") if ".experts." in name]
    assert len(names) == 24
    assert all(name.startswith("model.layers.0.") for name in names)
    assert summary.kept == 24 + 1
    before, after = read_tensors(src), read_tensors(tmp_path / "dst")
    kept = [name for name in before if name.startswith("model.layers.1.mlp.experts.")]
    assert kept
    assert all(torch.equal(after[name], before[name]) for name in kept)
    ignore = read_config(tmp_path / "dst")["quantization_config"]["ignore"]
    assert "model.layers.1.mlp.experts" in ignore
    assert "model.layers.1.mlp.experts.7.down_proj" in ignore


def test_summary_tells_the_error_of_each_type(qwen3: Path, tmp_path: Path) -> None:
    summary = quantize_checkpoint(qwen3, tmp_path / "dst", scales="sweep")
    assert list(summary.relative_mse_by_type) == [
        *("experts.down_proj", "experts.gate_proj", "experts.up_proj"),
        *("k_proj", "o_proj", "q_proj", "v_proj"),
    ]
    coarse = quantize_checkpoint(qwen3, tmp_path / "coarse")
    for type, error in summary.relative_mse_by_type.items():
        assert 0 < error < coarse.relative_mse_by_type[type]


PARTS = {
    "an expert": ["model.layers.0.mlp.experts.3"],
    "a projection": ["*.experts.*.down_proj"],
    "down, of any kind": ["down_proj"],
}


@pytest.mark.parametrize("ignore", PARTS.values(), ids=PARTS)
def test_a_part_of_a_layer_cannot_be_kept(qwen3: Path, tmp_path: Path, ignore: list[str]) -> None:
    with pytest.raises(
        QuantizerError,
        match=r"ignore: covers model\.layers\.0\.mlp\.experts\.\d\.\w+ but not .*; give model\.lay",
    ):
        quantize_checkpoint(qwen3, tmp_path / "dst", ignore=ignore)


def test_k_must_hold_whole_blocks_or_the_experts_be_kept(tmp_path: Path) -> None:
    src = save_mixture(tmp_path / "src", moe_checkpoints.qwen3(moe_intermediate_size=72))
    with pytest.raises(
        QuantizerError,
        match=r"experts\.0\.down_proj\.weight: K is 72, .*--ignore model\.layers\.0\.mlp\.experts$",
    ):
        quantize_checkpoint(src, tmp_path / "dst")
    quantize_checkpoint(src, tmp_path / "dst", ignore=["experts"])
    assert not [name for name in quantized_in(tmp_path / "dst") if ".experts." in name]


def change(src: Path, folder: Path, tensors: Mapping[str, Tensor | None]) -> Path:
    """Copy of a checkpoint with ``tensors`` replaced; None removes a tensor."""
    copy = Path(shutil.copytree(src, folder))
    changed = {n: t for n, t in (read_tensors(copy) | dict(tensors)).items() if t is not None}
    save_file(changed, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


EXPERT = "model.layers.1.mlp.experts.5"
SPOILT: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "an expert is missing": (
        {f"{EXPERT}.up_proj.weight": None},
        r"layers\.1\.mlp\.experts\.gate_up_proj: .* the checkpoint lacks up_proj of expert 5; save",
    ),
    "another shape": (
        {f"{EXPERT}.up_proj.weight": torch.ones(95, 128).bfloat16()},
        r"experts\.5\.up_proj\.weight: shape is \(95, 128\), config\.json asks for \(96, 128\)",
    ),
    "another type": (
        {f"{EXPERT}.down_proj.weight": torch.ones(128, 96, dtype=torch.int8)},
        r"experts\.5\.down_proj\.weight: dtype is I8, must be BF16, F16, F32; convert it",
    ),
    "NaN": (
        {f"{EXPERT}.down_proj.weight": torch.full((128, 96), float("nan")).bfloat16()},
        r"5\.down_proj\.weight: holds NaN .* --ignore model\.layers\.1\.mlp\.experts$",
    ),
}


@pytest.mark.parametrize(("tensors", "message"), SPOILT.values(), ids=SPOILT)
def test_spoilt_experts_are_named(qwen3: Path, tmp_path: Path, tensors: Any, message: str) -> None:
    with pytest.raises(QuantizerError, match=message):
        quantize_checkpoint(change(qwen3, tmp_path / "src", tensors), tmp_path / "dst")


def test_experts_that_give_nothing_are_named(qwen3: Path, text: Path, tmp_path: Path) -> None:
    zeros = {f"{EXPERT}.up_proj.weight": torch.zeros(96, 128).bfloat16()}
    src = change(qwen3, tmp_path / "src", zeros)
    with pytest.raises(
        QuantizerError,
        match=r"5\.down_proj: .* is -?0\.0, .* --ignore model\.layers\.1\.mlp\.experts$",
    ):
        quantize_checkpoint(src, tmp_path / "dst", calibrate=text, **CALIBRATION)


def test_biases_are_refused(tmp_path: Path) -> None:
    config = GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, intermediate_size=48)
    src = save_checkpoint(tmp_path / "src", config)
    with pytest.raises(QuantizerError, match=r"mlp\.experts: its experts have biases \(GptOss"):
        quantize_checkpoint(src, tmp_path / "dst")


CACHES = {
    "Qwen3-Next": [1],
    "Qwen3.5": [1],
    "Nemotron-H": [2],
    "Gemma 4": [0, 1],
    "Llama 4": [0, 1],
}


@pytest.mark.parametrize("family", CACHES)
@torch.no_grad()
def test_cache_and_head_of(
    family: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stateful mixers start anew with every batch, and only attention has cache scales."""
    monkeypatch.setattr(calibration, "_BATCH_TOKENS", 128)
    src = save_mixture(tmp_path / "src", FAMILIES[family]())
    quantize_checkpoint(
        src, tmp_path / "dst", calibrate=text, kv_cache_scheme="fp8", lm_head=True, **CALIBRATION
    )
    after = read_tensors(tmp_path / "dst")
    scales = [name for name in after if name.endswith("k_proj.k_scale")]
    layers = [int(next(part for part in name.split(".") if part.isdecimal())) for name in scales]
    assert sorted(layers) == CACHES[family]

    oracle = Oracle(src, family)
    sequences = read_sequences(text, AutoTokenizer.from_pretrained(src), 512, 64)
    for batch in sequences.split(2):
        oracle.model(batch, use_cache=False)
    for name in ("lm_head", *quantized_in(tmp_path / "dst")):
        scale = after[f"{name}.input_scale"].item()
        assert scale == (oracle.largest(name) / GLOBAL_RANGE).item(), name


def test_stacks_of_another_name_are_refused(tmp_path: Path) -> None:
    config = GraniteMoeConfig(
        **{name: size for name, size in SIZES.items() if name != "head_dim"},
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=48,
    )
    src = save_checkpoint(tmp_path / "src", config)
    with pytest.raises(
        QuantizerError, match=r"input_linear\.weight: stacks experts, must be called …experts\.gate"
    ):
        quantize_checkpoint(src, tmp_path / "dst")


def test_experts_of_another_kind_are_refused(tmp_path: Path) -> None:
    config = JetMoeConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=16,
        vocab_size=320,
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=48,
    )
    src = save_checkpoint(tmp_path / "src", config)
    with pytest.raises(
        QuantizerError, match=r"experts\.bias: belongs to experts that JetMoeForCausalLM does not"
    ):
        quantize_checkpoint(src, tmp_path / "dst")


def test_a_router_in_float32_is_run_so(text: Path, tmp_path: Path) -> None:
    config = HunYuanMoEV1Config(
        **SIZES,
        num_experts=4,
        moe_topk=2,
        moe_intermediate_size=48,
        intermediate_size=48,
        num_shared_expert=1,
    )
    src = save_mixture(tmp_path / "src", config)
    quantize_checkpoint(src, tmp_path / "dst", calibrate=text, **CALIBRATION)
    ignore = read_config(tmp_path / "dst")["quantization_config"]["ignore"]
    assert ignore == ["model.layers.0.mlp.gate.wg", "model.layers.1.mlp.gate.wg", "lm_head"]


def test_latent_caches_have_no_keys(text: Path, tmp_path: Path) -> None:
    src = save_mixture(tmp_path / "src", moe_checkpoints.deepseek())
    with pytest.raises(QuantizerError, match=r"kv_cache_scheme: DeepseekV3.* latent .*; leave out"):
        quantize_checkpoint(
            src, tmp_path / "dst", calibrate=text, kv_cache_scheme="fp8", **CALIBRATION
        )


def test_stacks_are_made_without_storage(tmp_path: Path) -> None:
    """Llama 4's constructor makes stacks of zeros, which must not be allocated."""
    from vllm_fp4_plugin.quantizer.linears import build_model
    from vllm_fp4_plugin.quantizer.source import open_source

    model = build_model(open_source(save_mixture(tmp_path / "src", llama4())))
    stacks = [parameter for parameter in model.parameters() if parameter.ndim == 3]
    assert len(stacks) == 4
    assert all(parameter.is_meta for parameter in stacks)
