"""Norms that quantise to FP8 for the layer that consumes their result."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import RowParallelLinear

from nvfp4_kernels import PerTokenFp8, StaticFp8, add_rms_norm_quantize, gemm, rms_norm_quantize
from nvfp4_kernels.devices import standing_in
from tests.sm90_product import sm90_ops
from tests.test_kernels.compilation import check_op
from tests.test_plugin.fusion.test_norm_flow import EPS, LINEAR, Block, said_of
from tests.test_plugin.linear.test_fp8_layers import hard_to_fold
from tests.test_plugin.linear.test_linear_layers import (
    LAYERS,
    TOKENS,
    K,
    checkpoint,
    load,
    quantised_shards,
    tensors_on_disk,
)
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.fusion import all_reduce_norm, attention_quantize
from vllm_fp4_plugin.fusion.attention import resolve_fusions as resolve_attention
from vllm_fp4_plugin.options import Options
from vllm_fp4_plugin.warmup import Norm

pytestmark = pytest.mark.usefixtures("vllm_config")
FP8 = {"nvfp4_tc": {"activation": "fp8"}}

SCALE = torch.tensor(0.003)
NORM = "model.layers.0.norm"
LABEL = "nvfp4_add_rms_norm_quantize_w4a8/RmsNormQuantizeFp8Sm90 (sm_90)"


@pytest.fixture(autouse=True)
def ask_for_fp8(vllm_config: Any) -> None:
    vllm_config.additional_config = FP8


@pytest.fixture(autouse=True)
def bfloat16() -> Any:
    """Set bfloat16, in which vLLM builds modules, as the default dtype."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def loaded(weight_only: bool = False, hard: bool = False) -> Any:
    block = Block(Nvfp4TcConfig(checkpoint(weight_only=weight_only)))
    torch.manual_seed(5)
    block.norm.weight.data = 1 + torch.randn(K) / 4
    torch.set_default_dtype(torch.float32)
    [shard] = quantised_shards([48], [1.0])
    shard = hard_to_fold(shard) if hard else shard
    layer: Any = block.mixer.in_proj
    load(layer, tensors_on_disk(shard, SCALE, checkpoint(weight_only=weight_only)))
    layer.quant_method.process_weights_after_loading(layer)
    return block


def device_of(arch: str) -> AbstractContextManager[Any]:
    return sm90_ops() if arch == "sm_90" else nullcontext()


@pytest.mark.parametrize("arch", ["cpu", "sm_90"])
@pytest.mark.parametrize("dims", [(TOKENS,), (2, 3)], ids=["tokens", "batch"])
@pytest.mark.parametrize("weight_only", [False, True], ids=["static", "per token"])
def test_to_the_bit_what_the_ops_say(
    weight_only: bool, dims: tuple[int, ...], arch: str, vllm_config: Any
) -> None:
    vllm_config.additional_config = {"nvfp4_tc": {"activation": "fp8"}}
    with device_of(arch):
        block = loaded(weight_only)
        x, residual = (torch.randn(*dims, K).bfloat16() for _ in range(2))
        first, same = block(None, x, None)
        second, after = block(None, x, residual)
    layer, weight = block.mixer.in_proj, block.norm.weight.data
    output: Any = PerTokenFp8() if weight_only else StaticFp8(layer.input_scale)
    product = None, layer.weight, layer.weight_scale, layer.alpha, [48]
    rows = x.view(-1, K), residual.view(-1, K)

    found = rms_norm_quantize(rows[0], weight, EPS, output)
    data, row_scale = found if weight_only else (found, None)
    assert torch.equal(first.view(-1, 48), gemm(data, *product, row_scale=row_scale))
    assert first.shape == (*dims, 48)
    assert same is x

    data, *scales, total = add_rms_norm_quantize(*rows, weight, EPS, output)
    row_scale = scales[0] if weight_only else None
    assert torch.equal(second.view(-1, 48), gemm(data, *product, row_scale=row_scale))
    assert torch.equal(after, total.view(x.shape))


def test_the_report_and_the_warmup() -> None:
    with standing_in("cpu", "sm_90"):
        block = Block(Nvfp4TcConfig(checkpoint()))
        assert said_of(block) == (LABEL, "quantises for in_proj")
    [record] = [r for r in block.quant.startup.report.layers if r.name == NORM]
    assert record.arithmetic == "A8 static"
    products = block.quant.startup.products
    assert products[NORM] == Norm("bfloat16", "bfloat16", K, False, 1, fp8=True)


def test_a_layer_of_weights_alone_leaves_the_norm_alone(vllm_config: Any) -> None:
    vllm_config.additional_config = {}
    with standing_in("cpu", "sm_90"):
        block = Block(Nvfp4TcConfig(checkpoint(weight_only=True)))
        assert said_of(block) == ("", "")
    assert block.norm.feeding is None


@pytest.mark.parametrize("weight_only", [False, True], ids=["static", "per token"])
def test_compiled_is_the_same(weight_only: bool, vllm_config: Any) -> None:
    vllm_config.additional_config = {"nvfp4_tc": {"activation": "fp8"}}
    block = loaded(weight_only)
    x, residual = (torch.randn(TOKENS, K).bfloat16() for _ in range(2))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for given in (None, residual):
        for found, expected in zip(compiled(x, x, given), block(x, x, given), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_opcheck(adds: bool, per_token: bool) -> None:
    torch.set_default_dtype(torch.float32)
    name = f"{'add_' * adds}rms_norm_quantize_fp8{'_per_token' * per_token}"
    x, residual = (torch.randn(TOKENS, K).bfloat16() for _ in range(2))
    rows = (x, residual) if adds else (x,)
    scale = () if per_token else (SCALE,)
    target = "nvfp4_kernels.quantize.rms_norm.reference:rms_norm_quantize"
    op = getattr(torch.ops.nvfp4_tc, name).default
    check_op(op, (*rows, torch.ones(K), EPS, *scale, target))


def test_before_a_weight_that_does_not_fold_the_norm_returns_16_bits() -> None:
    with sm90_ops() as product:
        block = loaded(hard=True)
        x, residual = (torch.randn(TOKENS, K).bfloat16() for _ in range(2))
        out, total = block(None, x, residual)
    assert block.norm.feeding is None
    assert product.formats == [(torch.bfloat16, torch.bfloat16)]
    hidden, expected_total = block.norm.forward_native(x, residual)
    assert torch.equal(total, expected_total)
    with sm90_ops():
        assert torch.equal(out, block.mixer.in_proj(hidden)[0])
    assert said_of(block) == ("vLLM", "in_proj takes 16 bits")
    assert block.quant.startup.products.keys() == {LINEAR, LINEAR.replace("in_", "out_")}


def test_no_norm_of_fp8_adds_up_over_ranks(vllm_config: Any) -> None:
    layers = {}
    for arch in ("cpu", "sm_90"):
        vllm_config.additional_config = {} if arch == "cpu" else FP8
        with standing_in("cpu", arch):
            layer: Any = LAYERS["row"][0](Nvfp4TcConfig(checkpoint()))
        layer.tp_size, layer.reduce_results = 2, True
        layers[arch] = all_reduce_norm._unsupported_reason(layer.quant_method.plan, layer)
    assert layers == {"cpu": "", "sm_90": "its kernel writes NVFP4 alone"}


class Attending(Module):
    """Owner of an attention, and of the layer that takes the attention's result."""

    def __init__(self, quant: Nvfp4TcConfig, prefix: str) -> None:
        super().__init__()
        self.attn = Attention(4, 64, 0.125, 4, quant_config=quant, prefix=f"{prefix}.attn")
        self.o_proj = RowParallelLinear(
            256, K, bias=False, quant_config=quant, prefix=f"{prefix}.o_proj"
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = self.o_proj(self.attn(q, k, v))
        return out


@pytest.mark.parametrize("option", ["per-token", "fp8"])
def test_attention_returns_16_bits(option: str, vllm_config: Any) -> None:
    vllm_config.additional_config = {"nvfp4_tc": {"activation": option}}
    owner: Any = Attending(Nvfp4TcConfig(checkpoint()), f"model.{option}.self_attn")
    method = owner.o_proj.quant_method
    assert attention_quantize.feeds(owner, "attn", owner.o_proj)
    report = method.startup.report
    resolve_attention([owner], owner.o_proj, method.plan, report, Options.of(vllm_config))
    [record] = [r for r in report.layers if r.name.endswith("o_proj")]
    note = "quantises its input itself: attention writes no FP8"
    assert record.reason == (f"activation is fp8; {note}" if option == "fp8" else "")
    assert owner.attn.impl.quantizes == (option != "fp8")
