"""Plan of a layer: its kernels are chosen once, when the layer is built, and then run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import RowParallelLinear

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.dispatch import KernelTable
from nvfp4_kernels.formats.nvfp4 import blocked_shape
from nvfp4_kernels.formats.output import Static
from nvfp4_kernels.gemm import reference as gemm
from nvfp4_kernels.gemm.silu_mul import reference as silu_mul_gemm
from nvfp4_kernels.quantize import reference as quantize
from nvfp4_kernels.quantize.call import QuantizeCall
from tests.test_kernels.compilation import check_op
from tests.test_plugin.linear.test_linear_layers import (
    LAYERS,
    K,
    checkpoint,
    finish,
    load,
    loaded_gate_up,
    quantised_shards,
    tensors_on_disk,
)
from vllm_fp4_plugin import sources
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.plan import KERNELS_KEY
from vllm_fp4_plugin.versions import PLUGIN

SCALE = torch.tensor(0.01)
# Quantisation of a layer's input, and its kernel on CPU.
QUANTIZERS = {
    "static": "nvfp4_kernels.quantize.reference:quantize",
    "per-token": "nvfp4_kernels.quantize.reference:quantize",
    "16-bit": None,
}


def row(config: Nvfp4TcConfig) -> Any:
    return LAYERS["row"][0](config)


def loaded_row(weight_only: bool = False) -> Any:
    quant = checkpoint(weight_only=weight_only)
    layer = row(Nvfp4TcConfig(quant))
    load(layer, tensors_on_disk(quantised_shards([48], [1.0])[0], SCALE, quant))
    finish(layer)
    return layer


@pytest.mark.parametrize("activation", QUANTIZERS)
def test_the_inputs_kernel_is_in_the_plan(activation: str, vllm_config: Any) -> None:
    if activation == "static":
        config = Nvfp4TcConfig(checkpoint())
    else:
        vllm_config.additional_config = {"nvfp4_tc": {"activation": activation}}
        config = Nvfp4TcConfig()
    plan = row(config).quant_method.plan
    assert plan.targets == ("nvfp4_kernels.gemm.reference:gemm", QUANTIZERS[activation])


@pytest.mark.usefixtures("vllm_config")
def test_on_blackwell_both_are_its_own() -> None:
    with standing_in("cpu", "sm_100"):
        plan = row(Nvfp4TcConfig(checkpoint())).quant_method.plan
    expected = "nvfp4_kernels.gemm.sm100.launch:gemm", "nvfp4_kernels.quantize.sm100:quantize"
    assert plan.targets == expected


def no_choice(*_: Any) -> NoReturn:
    raise AssertionError("a kernel was chosen again")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that run; the test forbids any further choice of kernels."""
    names: list[str] = []

    def counted(module: Any, name: str) -> Callable[..., Any]:
        function = getattr(module, name)

        def call(*given: Any) -> Any:
            names.append(name)
            return function(*given)

        return call

    for module, name in (
        (gemm, "gemm"), (silu_mul_gemm, "silu_mul_gemm"),
        (quantize, "quantize"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, counted(module, name))
    return names


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("weight_only", [False, True], ids=["w4a4", "w4a16"])
def test_a_call_chooses_nothing(
    weight_only: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = loaded_row(weight_only)
    pair, _ = loaded_gate_up(SCALE, weight_only=weight_only)
    x = torch.randn(3, K).bfloat16()
    expected, both = layer(x)[0], SiluAndMul()(pair(x)[0])
    calls.clear()
    monkeypatch.setattr(KernelTable, "find", no_choice)
    monkeypatch.setattr(KernelTable, "select", no_choice)
    assert torch.equal(layer(x)[0], expected)
    assert torch.equal(SiluAndMul()(pair(x)[0]), both)
    quantised = [] if weight_only else ["quantize"]
    assert calls == [*quantised, "gemm", *quantised, "silu_mul_gemm"]


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize(
    ("x", "came"),
    [
        (torch.zeros(2, K - 16).bfloat16(), r"bfloat16 \(2, 80\)"),
        (torch.zeros(2, K), r"float32 \(2, 96\)"),
    ],
    ids=["width", "dtype"],
)
def test_another_input_is_refused(x: Tensor, came: str) -> None:
    layer = loaded_row()
    message = rf"m\.down_proj: its input is {came}, must be bfloat16 or float16 \(\.\.\., 96\)"
    with pytest.raises(InvalidArgument, match=message):
        layer(x)


def test_compiled_graphs_are_kept_by_their_kernels(vllm_config: Any) -> None:
    """Compiled graphs name kernels, which differ by device and version."""
    hashes = []
    for arch in ("cpu", "sm_90", "sm_100"):
        vllm_config.additional_config = {"nvfp4_tc": {"fuse_mlp": False}, "theirs": 1}
        with standing_in("cpu", arch):
            for name in ("m.down_proj", "m.o_proj"):
                RowParallelLinear(
                    K, 48, bias=False, quant_config=Nvfp4TcConfig(checkpoint()), prefix=name
                )
        assert vllm_config.additional_config["theirs"] == 1
        hashes.append(vllm_config.compute_hash())
    assert len(set(hashes)) == 3
    assert vllm_config.additional_config[KERNELS_KEY] == [
        f"nvfp4-tc {PLUGIN} {sources.digest()}",
        "nvfp4_kernels.gemm.sm100.launch:gemm",
        "nvfp4_kernels.quantize.sm100:quantize",
    ]


def test_compiled_graphs_are_kept_by_the_sources(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Cached graphs are keyed by all sources of the plugin, as two versions may share a number."""
    file = tmp_path / "plugin" / "deeper" / "module.py"
    file.parent.mkdir(parents=True)
    monkeypatch.setattr(sources, "PACKAGES", (*sources.PACKAGES, tmp_path / "plugin"))
    monkeypatch.setattr(sources, "digest", sources.digest.__wrapped__)  # not kept
    hashes = []
    for source in ("a = 1", "a = 2", "a = 2"):
        file.write_text(source)
        vllm_config.additional_config = {}
        RowParallelLinear(
            K, 48, bias=False, quant_config=Nvfp4TcConfig(checkpoint()), prefix="m.o_proj"
        )
        hashes.append(vllm_config.compute_hash())
    assert hashes[0] != hashes[1] == hashes[2]


@pytest.mark.processes
@pytest.mark.parametrize("dims", [(5,), (2, 5)], ids=["tokens", "batch"])
@pytest.mark.parametrize(
    ("activation", "terms"),
    [("static", 1), ("static", 2), ("per-token", 1), ("per-token", 3), ("16-bit", 1)],
)
def test_opcheck(activation: str, terms: int, dims: tuple[int, ...]) -> None:
    x = torch.randn(*dims, K).bfloat16()
    weight = torch.randint(256, (2, 48, K // 2), dtype=torch.uint8)
    scales = torch.ones(2, *blocked_shape(48, K // 16)).to(torch.float8_e4m3fn)
    input_scale = SCALE if activation == "static" else None
    quantizer = QUANTIZERS[activation]
    one = weight[0], scales[0], torch.ones(1), [48], input_scale, torch.zeros(48).bfloat16()
    kernel = "nvfp4_kernels.gemm.reference:gemm"
    check_op(
        torch.ops.nvfp4_tc.linear.default, (x, None, None, *one, kernel, quantizer, terms, x.dtype)
    )
    both = weight, scales, torch.ones(2), 48, input_scale
    kernel = "nvfp4_kernels.gemm.silu_mul.reference:silu_mul_gemm"
    given = (*both, kernel, quantizer, terms)
    check_op(torch.ops.nvfp4_tc.silu_mul_linear.default, (x, None, None, *given, x.dtype))
    if activation != "16-bit":  # a reference of 16-bit activations takes them too
        check_op(
            torch.ops.nvfp4_tc.silu_mul_linear_quantized.default, (x, None, None, *given, SCALE, 2)
        )
    if activation == "static":
        of_before = (*quantize.quantize(QuantizeCall(x.view(-1, K), Static(SCALE, terms))), None)
        check_op(torch.ops.nvfp4_tc.silu_mul_linear.default, (*of_before, *given, x.dtype))
        check_op(
            torch.ops.nvfp4_tc.silu_mul_linear_quantized.default, (*of_before, *given, SCALE, 1)
        )
        how = "nvfp4_kernels.gemm.reference:gemm", quantizer, terms, x.dtype
        check_op(torch.ops.nvfp4_tc.linear.default, (*of_before, *one, *how))
