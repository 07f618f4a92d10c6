"""Features that ``VLLM_BATCH_INVARIANT`` excludes: refused by name before anything is loaded."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.determinism import batch_invariant as vllm_determinism
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.plugins import load_general_plugins

from nvfp4_kernels.gemm.kernels import KERNELS as GEMM_KERNELS
from tests.engine import report_command
from tests.mixed_checkpoints import write
from vllm_fp4_plugin import batch_invariance
from vllm_fp4_plugin.arithmetic.choice import choose_kernels
from vllm_fp4_plugin.attention.backend import PagedAttentionBackend
from vllm_fp4_plugin.batch_invariance import BatchInvarianceRefused
from vllm_fp4_plugin.device import planned_for
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.fusion import all_reduce_norm


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    load_general_plugins()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


def config(model: Path, **args: Any) -> Any:
    settings = {"quantization": "nvfp4-tc", "enforce_eager": True}
    return EngineArgs(model=str(model), **(settings | args)).create_engine_config()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"enforce_eager": False}, "torch.compile on a CPU"),
        ({"tensor_parallel_size": 2}, "several ranks on a CPU"),
        ({"enable_lora": True}, "LoRA"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative decoding",
        ),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
@pytest.mark.feature(
    "batch invariance",
    "refused",
    "`VLLM_BATCH_INVARIANT=1` with experts, layers in formats other than NVFP4 and 16 bits, "
    "hybrid models, MLA, images, LoRA, speculation; on a CPU also with torch.compile, several "
    "ranks and GELU; on a GPU with norms other than RMSNorm in compiled models; on an H200 with "
    "FlashAttention 3 for head sizes up to 64, an FP8 cache, and windows with head size 256",
)
def test_refused(modelopt: Path, given: dict[str, Any], what: str) -> None:
    with pytest.raises(BatchInvarianceRefused, match=f"must not be with {what}.*; .*unset it"):
        config(modelopt, **given)


@pytest.mark.slow
def test_refused_models(modelopt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = config(modelopt)
    model = type(engine.model_config)
    for name, value, what in (
        ("is_moe", True, "mixtures of experts"),
        ("is_hybrid", True, "layers of linear attention"),
        ("attn_type", "encoder_only", "layers of linear attention"),
        ("use_mla", True, "MLA"),
        ("is_multimodal_model", True, "images"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(
                model, name, property(lambda _, value=value: value), raising=name != "runner_type"
            )
            with pytest.raises(BatchInvarianceRefused, match=f"with {what}"):
                batch_invariance.refuse(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model_config, "runner_type", "pooling")
        with pytest.raises(BatchInvarianceRefused, match="with --runner pooling"):
            batch_invariance.refuse(engine)
    with monkeypatch.context() as patch:
        patch.setattr(model, "get_hidden_size", lambda _: 1 << 16)
        with pytest.raises(BatchInvarianceRefused, match="with rows of more than 32768 elements"):
            batch_invariance.refuse(engine)
    monkeypatch.setattr(engine.model_config.hf_text_config, "hidden_act", "gelu_pytorch_tanh")
    with pytest.raises(BatchInvarianceRefused, match="with hidden_act gelu_pytorch_tanh on a CPU"):
        batch_invariance.refuse(engine)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    batch_invariance.refuse(engine)


@pytest.mark.slow
def test_norms_that_are_compiled(modelopt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU keeps vLLM's norm kernel; norms without one, or with the kernel off, are refused."""
    monkeypatch.setattr(batch_invariance, "device_family", lambda _: "sm_90")
    engine = config(modelopt)
    compilation = engine.compilation_config
    compilation.mode, engine.model_config.enforce_eager = CompilationMode.VLLM_COMPILE, False
    compilation.custom_ops = ["none"]
    with pytest.raises(
        BatchInvarianceRefused, match=r"norms that torch.compile makes.*'\+rms_norm'"
    ):
        batch_invariance.refuse(engine)
    batch_invariance.keep_norms(engine)
    assert compilation.custom_ops == ["none", "+rms_norm"]
    batch_invariance.keep_norms(engine)
    assert compilation.custom_ops == ["none", "+rms_norm"]
    batch_invariance.refuse(engine)
    with set_current_vllm_config(engine):
        model = torch.nn.ModuleDict({"norm": RMSNorm(16), "gemma": GemmaRMSNorm(16)})
        with pytest.raises(BatchInvarianceRefused, match="with gemma, a GemmaRMSNorm that"):
            batch_invariance.check_norms(model)
        del model["gemma"]
        batch_invariance.check_norms(model)
    compilation.custom_ops = ["all", "-rms_norm"]
    batch_invariance.keep_norms(engine)
    with pytest.raises(BatchInvarianceRefused, match="norms that torch"):
        batch_invariance.refuse(engine)


@pytest.mark.parametrize(
    ("changes", "version", "refused"),
    [
        ({}, 3, ""),
        ({"head_size": 64}, 3, "heads of 64"),
        ({"head_size": 80}, 3, ""),
        ({"kv_cache_dtype": "fp8"}, 3, "an FP8 cache"),
        ({"head_size": 192, "sliding_window": 255}, 3, ""),
        ({"head_size": 256, "sliding_window": 255}, 3, "a window and heads of 256"),
        ({"head_size": 256}, 3, ""),
        ({"head_size": 64, "backend": "TRITON_ATTN"}, None, ""),
        ({"head_size": 64, "backend": "CUSTOM"}, None, ""),
        ({"head_size": 64}, 4, ""),
        ({"head_size": 64}, 2, ""),
    ],
)
def test_flash_attention_3(changes: dict[str, Any], version: int | None, refused: str) -> None:
    """FlashAttention 3 sums over keys in blocks whose size may depend on the batch."""
    given = {"head_size": 128, "kv_cache_dtype": "auto", "sliding_window": None} | changes
    name = given.pop("backend", "FLASH_ATTN")
    backend = SimpleNamespace(supports_batch_invariance=lambda: True, get_name=lambda: name)
    # vLLM's implementation of FLASH_ATTN alone has a version.
    impl = SimpleNamespace(**{} if version is None else {"vllm_flash_attn_version": version})
    layer = SimpleNamespace(get_attn_backend=lambda: backend, impl=impl, **given)
    expected = pytest.raises(BatchInvarianceRefused, match=f"attn, which has {refused}: .*TRITON")
    with expected if refused else nullcontext():
        batch_invariance.check_attention("attn", layer)


@pytest.mark.slow
def test_refused_layers(bf16: Path, modelopt: Path, tmp_path: Path) -> None:
    """The refusal comes from the model that the front end builds without weights."""
    with pytest.raises(UnsupportedCheckpoint, match=r"with \S*attn on CPU_ATTN; .*CUSTOM"):
        # Not in the checkpoint's FP8, for which CPU_ATTN needs AVX-512.
        config(modelopt, attention_backend="CPU_ATTN", kv_cache_dtype="bfloat16")
    kinds = {"o_proj": Kind.FP8, "down_proj": Kind.NVFP4}
    mixed = write(tmp_path / "mixed", bf16, modelopt, kinds, modelopt=True)
    with pytest.raises(UnsupportedCheckpoint, match=r"with \S*o_proj, which is FP8 per-tensor"):
        config(mixed.path)


@pytest.mark.parametrize(
    ("arch", "activation", "label"),
    [
        ("", "static", "nvfp4_gemm/reference (cpu, batch-invariant)"),
        ("sm_100", "static", "nvfp4_gemm/block_scaled (sm_100, batch-invariant)"),
        ("sm_90", "16-bit", "nvfp4_gemm_w4a16/wgmma (sm_90, batch-invariant)"),
        ("sm_90", "static", "nvfp4_gemm_w4a16/wgmma (sm_90, batch-invariant)"),
    ],
)
def test_kernels(arch: str, activation: Any, label: str) -> None:
    """FlashAttention serves attention on Hopper: the plugin's decode kernel has its own order."""
    with planned_for(arch):
        choice = choose_kernels(GEMM_KERNELS, activation, None, batch_invariant=True)
        assert choice.kernel.label == label
        assert PagedAttentionBackend.supports_batch_invariance() == (arch != "sm_90")


def test_no_reduction_in_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms leave the all-reduce to vLLM, which has a fixed order."""
    monkeypatch.setattr(all_reduce_norm, "get_tensor_model_parallel_world_size", lambda: 2)
    nothing: Any = None
    before = all_reduce_norm.before(nothing, nothing, nothing)
    assert (before.producer, before.reduction) == (None, None)
    assert before.note.endswith("vLLM's, whose order is fixed")


def test_experts() -> None:
    with pytest.raises(BatchInvarianceRefused, match="with experts, a layer of experts"):
        batch_invariance.check_experts("experts")


def test_terms() -> None:
    batch_invariance.check_terms("layer", 3, "cpu")
    batch_invariance.check_terms("layer", 1, "sm_100")
    with pytest.raises(BatchInvarianceRefused, match="with layer, whose activations are 3 terms"):
        batch_invariance.check_terms("layer", 3, "sm_100")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_report(arch: str, modelopt: Path, weight_only: Path) -> None:
    """The report names a GPU's kernels, or refuses W4A16, whose activations become 3 terms."""
    said = report_command(modelopt, "--arch", arch)
    assert said.exit_code == 0, said.output
    assert said.output.count("batch-invariant") >= 3
    if arch == "sm_100":
        refused = report_command(weight_only, "--arch", arch)
        assert refused.exit_code
        assert "in a layout that depends on the tokens" in " ".join(refused.output.split())


class Engine:
    """Stand-in for vLLM's current config when a worker starts."""

    def __init__(self, method: str) -> None:
        self.quant_config = type("Quantization", (), {"get_name": lambda self: method})()


@pytest.mark.parametrize(("method", "ours"), [("nvfp4-tc", True), ("fp8", False)])
def test_workers(method: str, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton kernels of vLLM replace torch's functions except on the plugin's CPU workers."""
    called: list[str] = []
    monkeypatch.setattr(batch_invariance, "_vllm_initialise", lambda: called.append("vllm"))
    monkeypatch.setattr(batch_invariance, "get_current_vllm_config", lambda: Engine(method))
    monkeypatch.setattr(utils, "cpu_unquantized_gemm", utils.cpu_unquantized_gemm)
    vllm_determinism.init_batch_invariance()
    assert called == [] if ours else ["vllm"]
    x, layer = torch.randn(3, 2, 16), torch.nn.Linear(16, 8)
    rows: list[int] = []

    def product(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        rows.append(len(x.reshape(-1, 16)))
        return torch.nn.functional.linear(x, weight, bias)

    layer.cpu_linear = product
    found = utils.cpu_unquantized_gemm(layer, x, layer.weight, layer.bias)
    torch.testing.assert_close(found, layer(x))
    assert max(rows) == (1 if ours else 6)
    assert utils.cpu_unquantized_gemm(layer, x[:0], layer.weight).shape == (0, 2, 8)
