"""Product kernels compiled ahead for sm_90: exactly the kernels that products launch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_kernels.formats.fragments import fragment_shapes
from nvfp4_kernels.gemm.call import GemmCall, SiluMulGemmCall
from nvfp4_kernels.gemm.sm90 import choose_fp8
from nvfp4_kernels.gemm.sm90.choose import Problem, choose_config, representative_tokens
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig
from nvfp4_kernels.precompile.linear_sm90 import fp8_epilogue, fp8_kernels, weight_only_kernels
from nvfp4_kernels.precompile.model import Layer, Model
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.runtime.compile import DeviceKernel
from nvfp4_kernels.sm90.limits import SMS
from nvfp4_kernels.tool.model import explicit, read_model
from nvfp4_kernels.tool.shapes import LLAMA_8B
from tests import devices
from tests.test_kernels.few_sms import use_sms

MOST = 2048
LAUNCHED = 600  # most tokens to launch; every launch runs an op's checks
SMALL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "dtype": "bfloat16",
}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fused": ({}, {}),
    "not fused": ({}, {"fuse_mlp": False}),
    "biases": ({"attention_bias": True, "mlp_bias": True}, {}),
    "float16": ({"dtype": "float16"}, {}),
    "four GPUs": ({}, {"tensor_parallel": 4}),
}


class Launches:
    """Recorder of the kernels that products would launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from nvfp4_kernels.gemm.sm90 import launch as product

        self.kernels: set[DeviceKernel] = set()
        self.product = product.gemm
        monkeypatch.setattr(product, "launch", lambda kernel, *_: self.kernels.add(kernel))
        use_sms(product, SMS, monkeypatch)

    def of_layer(self, layer: Layer, dtype: torch.dtype, most: int) -> set[DeviceKernel]:
        """Kernels that a layer launches for all numbers of tokens up to ``most``."""
        self.kernels = set()
        data, scales = fragment_shapes(layer.n, layer.k)
        weight = torch.zeros(data, dtype=torch.uint8), torch.zeros(scales).byte()
        alpha = torch.ones(max(layer.shards, layer.weights))
        rest = layer.n - 16 * (layer.shards - 1)
        shard_sizes = [rest, *[16] * (layer.shards - 1)]
        bias = torch.zeros(layer.n, dtype=dtype) if layer.bias else None
        x = torch.zeros(most, layer.k, dtype=dtype)
        for m in range(1, most + 1):
            operands = x[:m], None, *weight * layer.weights, alpha
            if layer.weights == 1:
                self.product(GemmCall(*operands, shard_sizes, None, bias, dtype))
            else:
                self.product(SiluMulGemmCall(*operands, None, layer.n, dtype))
        return self.kernels


@pytest.mark.processes
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_built_is_what_products_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    devices.cutlass_or_skip()
    changed, options = VARIANTS[variant]
    (tmp_path / "config.json").write_text(json.dumps(SMALL | changed))
    model = read_model(tmp_path, **options)
    built = weight_only_kernels(model, max_tokens=LAUNCHED)
    launches = Launches(monkeypatch)
    for layer in model.layers:
        launched = launches.of_layer(layer, getattr(torch, model.dtype), LAUNCHED)
        assert launched == {s.kernel() for s, users in built.items() if layer.name in users}


@pytest.mark.processes
@pytest.mark.parametrize("sms", [78, 114, 132])
@pytest.mark.parametrize("layer", LLAMA_8B.layers, ids=lambda layer: layer.name)
def test_every_number_of_tokens_is_served_like_a_telling_one(layer: Layer, sms: int) -> None:
    def chosen(tokens: "range | list[int]") -> set[object]:
        problems = (Problem(m, layer.n, layer.k, layer.weights) for m in tokens)
        return {choose_config(problem, EpilogueConfig(), sms) for problem in problems}

    assert chosen(representative_tokens(MOST)) == chosen(range(1, MOST + 1))


@pytest.mark.parametrize("most", [1, 8, 9, 64, 65, 96, 97])
def test_telling_tokens_end_with_the_batch(most: int) -> None:
    tokens = representative_tokens(most)
    assert tokens == sorted(set(tokens))
    assert tokens[0] == 1
    assert tokens == [m for m in representative_tokens(1000) if m <= most]


def test_layers_share_kernels() -> None:
    found = weight_only_kernels(explicit(["4096,4096", "4096,4160"], []), max_tokens=512)
    assert ["linear 4096,4096", "linear 4096,4160"] in found.values()


def test_neither_inputs_nor_attention_have_kernels() -> None:
    found: dict[KernelSpec, list[str]] = weight_only_kernels(LLAMA_8B, max_tokens=64)
    assert {spec.op for spec in found} == {"gemm", "silu_mul_gemm"}


def test_other_gpus_get_other_kernels() -> None:
    few, many = (weight_only_kernels(LLAMA_8B, max_tokens=2048, sms=sms) for sms in (78, 132))
    assert few.keys() != many.keys()


@pytest.mark.processes
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fastest", "batch-invariant"])
@pytest.mark.parametrize("per_token", [False, True], ids=["static", "per token"])
def test_every_number_of_tokens_has_its_fp8_kernel(per_token: bool, batch_invariant: bool) -> None:
    """K, no multiple of 64, is padded; gate and up write E4M3."""
    layers = (
        Layer("qkv", 1536, 1040, shards=3, bias=True),
        Layer("gate_up", 2816, 1040, gate_up=True, out_terms=1),
    )
    choose = choose_fp8.choose_batch_invariant if batch_invariant else choose_fp8.choose_config
    found = fp8_kernels(
        Model("", "bfloat16", layers), max_tokens=LAUNCHED, per_token=per_token,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    for layer in layers:
        output = fp8_epilogue(layer, "bfloat16", per_token)
        problems = (Problem(m, layer.n, 1088, layer.weights) for m in range(1, LAUNCHED + 1))
        chosen = {choose(problem, output, SMS) for problem in problems}
        products = [s for s, users in found.items() if layer.name in users and s.op != "quantize"]
        assert {spec.fields for spec in products} == chosen
        assert {spec.fields[1].dtype for spec in products} == {
            "float8_e4m3fn" if layer.out_terms else "bfloat16"
        }
    assert {spec.op for spec in found} == {"quantize", "gemm", "silu_mul_gemm"}
