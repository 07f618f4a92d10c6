"""Quantised ``lm_head``: loaded as by vLLM, padded, on two ranks, and in whole engines."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.model_executor.layers import vocab_parallel_embedding as embedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from nvfp4_kernels.formats.nvfp4 import Convention, Nvfp4Tensor, global_scale_of, row_global_scales
from tests import devices
from tests.emulator import randomised
from tests.engine import dequantized, distance, run
from tests.test_plugin.checkpoint.test_layer_kinds import NVFP4, headers
from tests.test_plugin.engine.test_engine import SAME_W4A4, SAME_W4A16
from tests.test_plugin.linear.test_linear_layers import (
    BF16_ROUNDING,
    INPUT_SCALE,
    checkpoint,
    expected_output,
    finish,
    load,
    quantised_shards,
    tensors_on_disk,
)
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

K = 96
VOCABULARY = 100  # vLLM pads it to 128


def head(config: Nvfp4TcConfig, prefix: str = "lm_head") -> Any:
    return ParallelLMHead(VOCABULARY, K, quant_config=config, prefix=prefix)


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("weight_only", [False, True], ids=["w4a4", "w4a16"])
@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_logits_of_a_padded_vocabulary(format: Convention, weight_only: bool) -> None:
    """Logits of the vocabulary equal the float64 product; logits of the padding are zero."""
    torch.manual_seed(0)
    x = torch.randn(5, K, dtype=torch.bfloat16)
    input_scale = global_scale_of(x)
    quant = checkpoint(format, weight_only=weight_only)
    layer = head(Nvfp4TcConfig(quant))
    [shard] = quantised_shards([VOCABULARY], [1.0])
    load(layer, tensors_on_disk(shard, input_scale, quant))
    finish(layer)
    logits = layer.quant_method.apply(layer, x)
    expected = expected_output(x, [shard], None if weight_only else input_scale)
    torch.testing.assert_close(logits[:, :VOCABULARY].double(), expected, **BF16_ROUNDING)
    assert logits.shape[1] == 128
    assert not logits[:, VOCABULARY:].any()


def bound_of_terms(x: Tensor, shard: Nvfp4Tensor) -> Tensor:
    """Bound on the loss of three terms in float64 logits, before rounding.

    The error of a term is half of E2M1's widest step, 2 of 6, and 2⁻⁴ of its block scale: at most a
    quarter of the block's remainder. Scales have a floor, see ``nvfp4_kernels.formats.terms``.
    """
    blocks = x.double().unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, -1)
    floor = row_global_scales(x).double().unsqueeze(-1) * 2.0**-11
    lost = torch.maximum(blocks * 0.25**3, floor)
    return lost @ shard.dequantize(torch.float64).abs().T


def check_logits_of_terms(logits: Tensor, x: Tensor, shard: Nvfp4Tensor) -> None:
    """Check logits of a vocabulary against the dequantised weight and 16-bit activations."""
    exact = expected_output(x, [shard], None)
    rounding = exact.abs() * BF16_ROUNDING["rtol"] + BF16_ROUNDING["atol"]
    off = (logits[:, :VOCABULARY].double() - exact).abs()
    assert (off <= bound_of_terms(x, shard) + rounding).all()
    assert off.norm() < 2 * (2.0**-9 * exact).norm()  # half a unit of bfloat16
    assert not logits[:, VOCABULARY:].any()


@pytest.mark.parametrize("arch", ["cpu", "sm_100"])
def test_logits_of_three_terms(arch: str, vllm_config: Any) -> None:
    """A weight-only head uses three terms: by option on CPU, by default on Blackwell."""
    torch.manual_seed(0)
    x, quant = torch.randn(5, K, dtype=torch.bfloat16), checkpoint(weight_only=True)
    [shard] = quantised_shards([VOCABULARY], [1.0])
    with ExitStack() as stack:
        if arch == "cpu":
            vllm_config.additional_config = {"nvfp4_tc": {"activation_terms": {"lm_head": 3}}}
        else:
            devices.cutlass_or_skip()
            stack.enter_context(devices.emulated_ops(randomised(1)))
        layer = head(Nvfp4TcConfig(quant))
        load(layer, tensors_on_disk(shard, INPUT_SCALE, quant))
        finish(layer)
        logits = layer.quant_method.apply(layer, x)
    plan = layer.quant_method.plan
    assert (plan.kernel.arch, plan.arithmetic) == (arch, "W4A4×3 per-token")
    check_logits_of_terms(logits, x, shard)


@pytest.mark.parametrize("terms", [None, 3])
def test_two_ranks_hold_half_of_the_vocabulary_each(
    terms: int | None, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank's half ends in padding."""
    torch.manual_seed(0)
    x, quant = torch.randn(5, K, dtype=torch.bfloat16), checkpoint(weight_only=True)
    if terms is not None:
        vllm_config.additional_config = {"nvfp4_tc": {"activation_terms": terms}}
    [shard] = quantised_shards([VOCABULARY], [1.0])
    monkeypatch.setattr(embedding, "get_tensor_model_parallel_world_size", lambda: 2)
    logits = []
    for rank in (0, 1):
        monkeypatch.setattr(embedding, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        layer = head(Nvfp4TcConfig(quant))
        load(layer, tensors_on_disk(shard, INPUT_SCALE, quant))
        finish(layer)
        logits.append(layer.quant_method.apply(layer, x))
        assert logits[-1].shape == (5, 64)
    whole = torch.cat(logits, dim=1)
    if terms is not None:
        check_logits_of_terms(whole, x, shard)
        return
    expected = expected_output(x, [shard], None)
    torch.testing.assert_close(whole[:, :VOCABULARY].double(), expected, **BF16_ROUNDING)


@pytest.mark.usefixtures("vllm_config")
def test_padded_rows_on_disk_are_refused() -> None:
    quant = checkpoint()
    layer = head(Nvfp4TcConfig(quant))
    [shard] = quantised_shards([128], [1.0])
    with pytest.raises(UnsupportedCheckpoint, match=r"lm_head\.weight: .* must be \(100, 48\)"):
        load(layer, tensors_on_disk(shard, INPUT_SCALE, quant))


@pytest.mark.usefixtures("vllm_config")
def test_a_head_that_the_config_ignores_is_vllms() -> None:
    layer = head(Nvfp4TcConfig(checkpoint(ignore=("lm_head",))))
    assert type(layer.quant_method) is UnquantizedEmbeddingMethod


@pytest.mark.usefixtures("vllm_config")
def test_a_head_that_is_not_quantised_online() -> None:
    assert type(head(Nvfp4TcConfig()).quant_method) is UnquantizedEmbeddingMethod


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("quantization", ["fp8", "nvfp4"])
def test_a_copy_for_drafts_is_of_16_bits(quantization: Any) -> None:
    """A quantised head is refused by ``draft_lm_head_quantization`` of vLLM 0.33."""
    copies = pytest.importorskip("vllm.model_executor.layers.quantization.online.lm_head")
    ours, theirs = head(Nvfp4TcConfig(checkpoint("modelopt"))), head(Nvfp4TcConfig())
    with pytest.raises(ValueError, match="needs an unquantized fp16/bf16 lm_head"):
        copies.quantized_lm_head_copy(ours, quantization)
    assert type(theirs.quant_method) is UnquantizedEmbeddingMethod  # which it takes


def test_a_tied_head_is_the_embedding(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_config.model_config.hf_text_config, "tie_word_embeddings", True)
    config = Nvfp4TcConfig(checkpoint())
    assert type(head(config).quant_method) is UnquantizedEmbeddingMethod
    assert config._kinds is not None
    config._kinds.read(headers({"lm_head": NVFP4}))
    with pytest.raises(UnsupportedCheckpoint, match=r"lm_head: is quantised, .*tie_word_embed"):
        head(config)


@pytest.mark.usefixtures("vllm_config")
def test_a_head_that_the_models_code_ties_is_refused() -> None:
    layer = head(Nvfp4TcConfig(checkpoint()))
    with pytest.raises(UnsupportedCheckpoint, match="takes its embedding as the head"):
        layer.tie_weights(layer)


@pytest.mark.parametrize("architecture", ["ClefFlashForJointSchema", "LlamaForCausalLM"])
def test_a_head_of_which_a_model_looks_up_rows(
    architecture: str, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_config.model_config.hf_config, "architectures", [architecture])
    if architecture == "LlamaForCausalLM":
        head(Nvfp4TcConfig(checkpoint()))
        return
    with pytest.raises(UnsupportedCheckpoint, match=r"lm_head: is NVFP4.* looks up rows of it"):
        head(Nvfp4TcConfig(checkpoint()))


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("gathers", [True, False])
def test_a_head_whose_rows_a_draft_gathers(gathers: bool) -> None:
    """DSpark itself multiplies gathered rows as 16-bit values, so a quantised head is refused."""
    quant = checkpoint(weight_only=True)
    layer = head(Nvfp4TcConfig(quant), "model.markov_head.markov_w2")
    layer._retain_weight_for_gather = gathers
    [shard] = quantised_shards([VOCABULARY], [1.0])
    load(layer, tensors_on_disk(shard, INPUT_SCALE, quant))
    if not gathers:
        finish(layer)
        return
    with pytest.raises(UnsupportedCheckpoint, match=r"markov_w2: is NVFP4, must be in 16 bits"):
        finish(layer)


# --- engines ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weight_only_head(bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dst = tmp_path_factory.mktemp("head") / "model"
    quantize_checkpoint(bf16, dst, lm_head=True)
    return dst


@pytest.mark.slow
def test_weight_only_engine(weight_only_head: Path) -> None:
    served = run(str(weight_only_head))
    assert distance(served, dequantized(weight_only_head)) < SAME_W4A16
    assert "lm_head ×1: nvfp4_gemm_w4a16/reference (cpu), W4A16" in served.report


@pytest.mark.slow
def test_weight_only_engine_in_terms(weight_only_head: Path) -> None:
    served = run(str(weight_only_head), additional_config={"nvfp4_tc": {"activation_terms": 3}})
    assert distance(served, dequantized(weight_only_head)) < SAME_W4A16
    told = "lm_head ×1: nvfp4_gemm/reference (cpu), W4A4×3 per-token, activation_terms is 3"
    assert told in served.report


@pytest.mark.slow
def test_calibrated_engine(
    bf16: Path, calibration: Path, weight_only_head: Path, tmp_path: Path
) -> None:
    dst = tmp_path / "model"
    quantize_checkpoint(
        bf16, dst, calibrate=calibration, seq_len=128, lm_head=True, format="compressed-tensors"
    )
    tensors = load_file(dst / "model.safetensors")
    assert tensors["lm_head.input_global_scale"].isfinite()
    served = run(str(dst))
    assert "lm_head ×1: nvfp4_gemm/reference (cpu), W4A4 static" in served.report
    assert 0 < distance(served, dequantized(weight_only_head)) < 2 * SAME_W4A4
