"""Mixtures of NVFP4 experts in real engines, against transformers on the decoded weights.

The models are small and trained. Bounds on the mean absolute difference of log-probabilities are
about three times the values seen, and far below the effect of a wrong scale or a wrong expert.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import limits, moe_checkpoints, moe_reference, preloaded, trained_mixtures
from tests.catalogue import checkpoint
from tests.catalogue.facts import named
from tests.engine import Run, distance, run, started
from tests.moe_reference import Moe
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

pytestmark = pytest.mark.slow

SAME = 0.004  # W4A16: .001
SAME_W4A4 = 0.03  # .003 to .010
SAME_FP8 = 0.03  # FP8 layers round their inputs, the reference does not
QUANTISED = 0.05  # from the 16-bit model: .005 to .016

W4A16 = "nvfp4_grouped_silu_mul_gemm_w4a16/reference (cpu), W4A16"
W4A4 = "nvfp4_grouped_silu_mul_gemm/reference (cpu), W4A4"
MLP = ("experts", "shared_experts", "gate_proj", "up_proj", "down_proj")
NO_IMAGES = {"limit_mm_per_prompt": {"image": 0}}


@pytest.fixture(scope="session")
def plain(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """Trained model of a family, kept between runs."""
    cache = pytestconfig.rootpath / ".cache" / "tests"
    return lambda family: trained_mixtures.trained(family, cache)


@pytest.fixture(scope="session")
def quantised(
    plain: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Moe]:
    """Trained model, quantised once by the tool except for attention."""
    made: dict[tuple[str, str, bool], Moe] = {}
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(trained_mixtures.learnt())

    def quantise(family: str, format: str, *, calibrated: bool) -> Moe:
        key = (family, format, calibrated)
        if key not in made:
            directory = tmp_path_factory.mktemp("quantised")
            options: dict[str, Any] = {"calibrate": text, "seq_len": 64} if calibrated else {}
            path = directory / "model"
            quantize_checkpoint(plain(family), path, format=format, ignore=["self_attn"], **options)
            made[key] = moe_reference.decoded(path, directory / "decoded")
            assert bool(made[key].input_scales) == calibrated
        return made[key]

    return quantise


def of_16_bits(path: Path) -> Run:
    """Log-probabilities of the model before quantisation."""
    return moe_reference.said(Moe(path, path, {}))


def next_expert(experts: Any) -> None:
    """Replace each expert by its neighbour."""
    for weights in (experts.gate_up_proj, experts.down_proj):
        weights.data.copy_(weights.data.roll(1, 0))


@dataclass(frozen=True)
class Case:
    """Model family in a checkpoint format.

    Attributes:
        family: one of ``trained_mixtures.FAMILIES``.
        format: format of the checkpoint.
        row: description of the experts in the engine's report.
        bound: largest distance allowed.
    """

    family: str
    format: str
    row: str
    bound: float

    def __str__(self) -> str:
        return ", ".join((self.family, self.format, "W4A4" if W4A4 in self.row else "W4A16"))


CASES = (
    Case("Qwen3", "modelopt", f"×2: {W4A16}", SAME),
    Case("Qwen3", "compressed-tensors", f"×2: {W4A4} static", SAME_W4A4),
    Case("Mixtral", "compressed-tensors", f"×2: {W4A16}", SAME),
    Case("Mixtral", "modelopt", f"×2: {W4A4} static", SAME_W4A4),
    Case("DeepSeek V3", "modelopt", f"×1: {W4A4} static", SAME_W4A4),
    Case("DeepSeek V3", "compressed-tensors", f"×1: {W4A16}", SAME),
    Case("GLM 4", "compressed-tensors", f"×1: {W4A4} static", SAME_W4A4),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_served(case: Case, quantised: Callable[..., Moe], plain: Callable[[str], Path]) -> None:
    """The engine agrees with transformers; weight-only, it also generates the same text."""
    calibrated = "static" in case.row
    moe = quantised(case.family, case.format, calibrated=calibrated)
    found, expected = run(str(moe.path)), moe_reference.said(moe)
    assert f"experts {case.row}" in found.report
    assert distance(found, expected) < case.bound
    if not calibrated:
        assert found.generated == expected.generated
    assert distance(found, of_16_bits(plain(case.family))) < QUANTISED
    wrong = moe_reference.with_experts(moe_reference.opened(moe), next_expert)
    assert distance(found, wrong) > 2 * case.bound


def test_one_scale_for_gate_and_up(quantised: Callable[..., Moe]) -> None:
    """Scales of gate and up differ: gate's scale, or the largest, for both changes the result."""
    moe = quantised("Qwen3", "modelopt", calibrated=False)
    found, stored = run(str(moe.path)), load_file(moe.path / "model.safetensors")
    assert distance(found, moe_reference.said(moe)) < SAME
    for rule in (lambda gate, up: gate, torch.maximum):
        model = moe_reference.opened(moe)
        for number, layer in enumerate(model.model.layers):
            for expert, weights in enumerate(layer.mlp.experts.gate_up_proj.data):
                start = f"model.layers.{number}.mlp.experts.{expert}"
                scales = [stored[f"{start}.{each}_proj.weight_scale_2"] for each in ("gate", "up")]
                for weight, scale in zip(weights.chunk(2), scales, strict=True):
                    weight *= rule(*scales) / scale
        assert distance(found, moe_reference.says(model)) > 50 * SAME


@pytest.mark.parametrize("strategy", ["uniform_random", "normal_routing"])
def test_simulated_routes(
    quantised: Callable[..., Moe], monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Simulated routes for benchmarks must not be replaced by the plugin's choice of experts."""
    path = str(quantised("Qwen3", "modelopt", calibrated=False).path)
    real = run(path)
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", strategy)
    simulated = run(path)
    assert distance(real, simulated) > 10 * SAME
    [ours, theirs] = [
        next(line for line in each.report if line.startswith("experts ×"))
        for each in (real, simulated)
    ]
    assert "experts chosen by vLLM" not in ours
    # Since 0.33 vLLM may simulate the logits instead.
    assert strategy == "uniform_random" or "experts chosen by vLLM: " in theirs


def test_compiled_equals_eager(quantised: Callable[..., Moe]) -> None:
    """The compiled model rounds in other places."""
    path = str(quantised("Mixtral", "compressed-tensors", calibrated=False).path)
    compiled, eager = run(path, enforce_eager=False), run(path)
    assert distance(compiled, eager) < SAME
    assert compiled.generated == eager.generated


def test_glm4_of_mixed_precision(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """The model has a dense layer, routed and shared experts, and FP8 attention by vLLM."""
    kinds = dict.fromkeys(MLP, Kind.NVFP4_A16) | {"self_attn": Kind.FP8_CHANNEL}
    moe = moe_checkpoints.write(tmp_path, plain("GLM 4"), kinds)
    found, expected = run(str(moe.path)), moe_reference.said(moe)
    assert f"experts ×1: {W4A16}" in found.report
    assert "gate_up_proj ×2: nvfp4_silu_mul_gemm_w4a16/reference (cpu), W4A16" in found.report
    assert "qkv_proj ×2: fp8 (vLLM: ModelOptLinearMethod), W8A8 dynamic" in found.report
    assert distance(found, expected) < SAME_FP8
    assert found.generated == expected.generated


def test_stacked_experts(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """Llama 4's experts are two transposed tensors on disk; router weights scale the inputs.

    The checkpoint is quantised as by NVIDIA, and at load.
    """
    trained = plain("Llama 4")
    weights = moe_reference.opened(Moe(trained, trained, {})).state_dict()
    family = replace(named("Llama 4 (experts, vision)"), fp8_kv=False)
    path = checkpoint.write(family, tmp_path / "model", lambda m: m.load_state_dict(weights))
    shutil.copy(trained / "preprocessor_config.json", path)
    moe = moe_reference.decoded(path, tmp_path / "decoded")
    found = run(str(path), **NO_IMAGES)
    theirs = "experts chosen by vLLM: the model has a function for it"
    assert f"experts ×2: {W4A4} static, {theirs}" in found.report
    assert distance(found, moe_reference.said(moe)) < SAME_W4A4
    wrong = moe_reference.with_experts(moe_reference.opened(moe), next_expert)
    assert distance(found, wrong) > 2 * SAME_W4A4

    found = run(str(trained), **NO_IMAGES)
    assert f"experts ×2: {W4A4} per-token, {theirs}" in found.report
    assert distance(found, of_16_bits(trained)) < QUANTISED


@pytest.mark.parametrize("lacking", ["an expert's scales", "all experts"])
def test_reload(
    lacking: str,
    quantised: Callable[..., Moe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = quantised("Qwen3", "modelopt", calibrated=False)
    start = "model.layers.1.mlp.experts." + ("5.up_proj.w" if "scales" in lacking else "")
    copy = tmp_path / "copy"
    shutil.copytree(model.path, copy)

    def without(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(start)]:
            del tensors[name]

    moe_checkpoints.change(copy, without)

    def reload(worker: Any) -> None:
        experts = worker.model_runner.model.get_submodule("model.layers.1.mlp.experts")
        before = experts.routed_experts.w13_weight.clone()
        held = {name: each.data_ptr() for name, each in experts.named_parameters()}
        worker.reload_weights(weights_path=str(model.path))
        assert torch.equal(experts.routed_experts.w13_weight, before)
        # CUDA graphs refer to these addresses.
        assert {name: each.data_ptr() for name, each in experts.named_parameters()} == held
        with pytest.raises(UnsupportedCheckpoint, match=rf"{copy}: holds no {start}"):
            worker.reload_weights(weights_path=str(copy))

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with started(str(model.path)) as llm:
        llm.collective_rpc(reload)


@pytest.mark.parametrize("activation", ["16-bit", "per-token"])
def test_experts_of_a_16_bit_checkpoint(
    activation: str, plain: Callable[[str], Path], quantised: Callable[..., Moe]
) -> None:
    """Quantising at load follows the tool's rule and gives the same weights."""
    options = {"activation": activation, "ignore": ["*self_attn*"]}
    found = run(str(plain("Qwen3")), additional_config={"nvfp4_tc": options})
    arithmetic = W4A16 if activation == "16-bit" else f"{W4A4} per-token"
    assert f"experts ×2: {arithmetic}" in found.report
    expected = moe_reference.said(quantised("Qwen3", "modelopt", calibrated=False))
    if activation == "16-bit":
        assert distance(found, expected) < SAME
        assert found.generated == expected.generated
    else:
        assert SAME < distance(found, expected) < SAME_W4A4


def test_experts_that_stay_in_16_bits(plain: Callable[[str], Path]) -> None:
    options = {"ignore": ["*.1.mlp.experts"]}
    found = run(str(plain("Qwen3")), additional_config={"nvfp4_tc": options})
    row = "experts ×1: unquantized (vLLM), 16-bit, ignored by '*.1.mlp.experts'"
    rows = [line for line in found.report if line.startswith("experts")]
    assert rows == [f"experts ×1: {W4A4} per-token", row]
    assert distance(found, of_16_bits(plain("Qwen3"))) < QUANTISED


# --- two ranks ----------------------------------------------------------------------------------

TP, DP = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}
EP = {"enable_expert_parallel": True}
AT_LOAD = {"additional_config": {"nvfp4_tc": {"activation": "16-bit", "ignore": ["*self_attn*"]}}}

# Models and arguments; 16-bit checkpoints where they are quantised at load. On a CPU vLLM does not
# gather rows of data-parallel ranks: ``tests.ranks`` adds that.
PARALLEL: dict[str, tuple[str, str, bool, dict[str, Any]]] = {
    "half of every expert": ("Mixtral", "compressed-tensors", False, TP),
    "half of the experts": ("DeepSeek V3", "modelopt", True, TP | EP),
    "half of the experts, quantised at load": ("Qwen3", "modelopt", False, TP | EP | AT_LOAD),
    "half of the tokens and experts": ("Qwen3", "compressed-tensors", True, DP | EP),
    "half of the tokens, and of every expert": ("Qwen3", "modelopt", False, DP | AT_LOAD),
}


@pytest.fixture(scope="module")
def two_ranks(
    quantised: Callable[..., Moe], plain: Callable[[str], Path]
) -> dict[str, list[dict[str, Any]]]:
    """Answers of the ranks of each engine; the engines run one after the other in one process."""
    models_and_arguments: list[str] = []
    for family, format, calibrated, arguments in PARALLEL.values():
        at_load = "additional_config" in arguments
        path = plain(family) if at_load else quantised(family, format, calibrated=calibrated).path
        models_and_arguments += [str(path), json.dumps(arguments)]
    one_node = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        preloaded.command("tests.ranks", *models_and_arguments), env=os.environ | one_node,
        capture_output=True, text=True, check=False, timeout=limits.PROCESS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{")]
    return dict(zip(PARALLEL, said, strict=True))


@pytest.mark.feature(
    "expert parallelism",
    "works",
    "experts sharded by tensor, expert and data parallelism over two ranks: matches the "
    "transformers model",
)
@pytest.mark.parametrize("parallel", PARALLEL)
def test_two_ranks(
    parallel: str, two_ranks: dict[str, list[dict[str, Any]]], quantised: Callable[..., Moe]
) -> None:
    family, format, calibrated, arguments = PARALLEL[parallel]
    expected = moe_reference.said(quantised(family, format, calibrated=calibrated))
    first, second = two_ranks[parallel]
    assert first["generated"] == expected.generated
    if DP.keys() <= arguments.keys():  # its text is shorter
        assert len(second["logprobs"]) < len(expected.logprobs)
    else:
        assert second == first
    for rank in (first, second):
        pairs = zip(rank["logprobs"], expected.logprobs, strict=False)
        apart = sum(abs(a - b) for a, b in pairs) / len(rank["logprobs"])
        assert apart < (SAME_W4A4 if calibrated else SAME)
