"""Kernels compiled while a model is loaded include every kernel that its products launch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

from nvfp4_kernels.devices import SM_COUNTS, DeviceFacts, standing_in
from nvfp4_kernels.formats.nvfp4 import blocked_shape
from nvfp4_kernels.precompile.model import Layer
from tests import devices
from tests.emulator import EAGER
from tests.sm90_product import sm90_ops
from vllm_fp4_plugin import startup, warmup
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.formats import FORMATS, CheckpointConfig
from vllm_fp4_plugin.ops.linear import (
    linear,
    silu_mul_linear,
    silu_mul_linear_fp8,
    silu_mul_linear_quantized,
)
from vllm_fp4_plugin.plan import product_of
from vllm_fp4_plugin.startup import Startup
from vllm_fp4_plugin.warmup import Norm, Product

K = 96


@pytest.fixture
def quant() -> Nvfp4TcConfig:
    return Nvfp4TcConfig(CheckpointConfig(FORMATS["modelopt"], weight_only=False))


def qkv(**options: Any) -> Any:
    return QKVParallelLinear(K, 32, 2, 1, **options)


# Layer, its name, and the expected sizes.
LAYERS: dict[str, tuple[Any, str, Layer]] = {
    "qkv": (
        lambda **o: qkv(bias=False, **o),
        "qkv_proj",
        Layer("", 128, K, shards=3),
    ),
    "qkv with a bias": (
        lambda **o: qkv(bias=True, **o),
        "qkv_proj",
        Layer("", 128, K, shards=3, bias=True),
    ),
    "gate and up": (
        lambda **o: MergedColumnParallelLinear(K, [160, 160], bias=False, **o),
        "gate_up_proj",
        Layer("", 160, K, gate_up=True),
    ),
    "gate and up, not fused for their bias": (
        lambda **o: MergedColumnParallelLinear(K, [160, 160], bias=True, **o),
        "gate_up_proj",
        Layer("", 320, K, shards=2, bias=True),
    ),
    "row-parallel with a bias": (
        lambda **o: RowParallelLinear(K, 64, bias=True, **o),
        "o_proj",
        Layer("", 64, K, bias=True),
    ),
    "a bias that the model adds": (
        lambda **o: ColumnParallelLinear(K, 64, bias=True, skip_bias_add=True, **o),
        "up_proj",
        Layer("", 64, K),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_products_of_layers(vllm_config: Any, quant: Nvfp4TcConfig, name: str) -> None:
    build, last, expected = LAYERS[name]
    with sm90_ops():
        build(quant_config=quant, prefix=f"model.layers.0.{last}")
    assert set(quant.startup.products.values()) == {
        Product("sm_90", expected, "bfloat16", "16-bit")
    }
    assert quant.startup.max_tokens == vllm_config.scheduler_config.max_num_batched_tokens


@pytest.mark.parametrize("name", LAYERS)
def test_products_of_layers_on_blackwell(vllm_config: Any, quant: Nvfp4TcConfig, name: str) -> None:
    build, last, expected = LAYERS[name]
    with standing_in("cpu", "sm_100"):
        build(quant_config=quant, prefix=f"model.layers.0.{last}")
    assert set(quant.startup.products.values()) == {
        Product("sm_100", expected, "bfloat16", "static")
    }


def test_quantised_at_load_each_token_has_a_scale(vllm_config: Any) -> None:
    quant = Nvfp4TcConfig()
    with standing_in("cpu", "sm_100"):
        RowParallelLinear(K, 64, bias=False, quant_config=quant, prefix="model.o_proj")
    assert set(quant.startup.products.values()) == {
        Product("sm_100", Layer("", 64, K), "bfloat16", "per-token")
    }


def test_other_ranks_add_no_bias(vllm_config: Any, quant: Nvfp4TcConfig) -> None:
    with sm90_ops():
        layer = RowParallelLinear(K, 64, bias=True, quant_config=quant, prefix="model.o_proj")
        layer.tp_rank = 1
        product = product_of(layer, layer.quant_method.plan, torch.bfloat16)
    assert product == Product("sm_90", Layer("", 64, K), "bfloat16", "16-bit")


def test_elsewhere_nothing_is_expected(vllm_config: Any, quant: Nvfp4TcConfig) -> None:
    qkv(bias=False, quant_config=quant, prefix="model.qkv_proj")
    assert not quant.startup.products


@pytest.fixture
def bound() -> Iterator[None]:
    """Bind CuTe DSL to the emulator; torn down after the patches of other fixtures."""
    with devices.emulated(EAGER, "sm_90"):
        yield


@pytest.fixture
def gpu(bound: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """GPU on which kernels would be compiled; the list records the kernels."""
    made: list[Any] = []
    monkeypatch.setenv("NVFP4_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(warmup, "device_facts", lambda it: DeviceFacts(it, "sm_90", 132))
    monkeypatch.setattr(warmup, "compiled", lambda kernel, _: made.append(kernel))
    monkeypatch.setattr(warmup, "build_apart", lambda *_: [])
    monkeypatch.setattr(warmup, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(warmup, "get_tensor_model_parallel_world_size", lambda: 1)
    return made


PRODUCTS = [
    Product("sm_90", Layer("", 4096, 4096), "bfloat16", "16-bit"),
    Product("sm_90", Layer("", 14336, 4096, gate_up=True), "bfloat16", "16-bit"),
]
CUDA = torch.device("cuda")


def test_each_kernel_once(gpu: list[Any], tmp_path: Path) -> None:
    line = warmup.compile_products([*PRODUCTS, PRODUCTS[0]], 2048, CUDA)
    assert len(gpu) == len(set(gpu)) > 10
    assert line.startswith(f"compiled {len(gpu)} of {len(gpu)} linear layers' kernels in ")
    assert line.endswith(f"; kept in {tmp_path}")


def test_what_is_there_is_loaded_without_a_word(gpu: list[Any]) -> None:
    warmup.compile_products(PRODUCTS, 64, CUDA)
    for kernel in gpu[1:]:
        place = warmup.object_path(kernel)
        assert place is not None
        place.touch()
    count = len(gpu)
    assert warmup.compile_products(PRODUCTS, 64, CUDA).startswith(f"compiled 1 of {count} linear ")
    first = warmup.object_path(gpu[0])
    assert first is not None
    first.touch()
    assert warmup.compile_products(PRODUCTS, 64, CUDA) == ""
    assert len(gpu) == 3 * count


def test_without_a_cache(gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVFP4_KERNELS_CACHE", "")
    line = warmup.compile_products(PRODUCTS, 8, CUDA)
    assert line.endswith("; not kept, as NVFP4_KERNELS_CACHE is empty")


@pytest.mark.parametrize(
    ("cpus", "ranks", "jobs"), [(16, 1, 8), (5, 1, 5), (16, 4, 4), (2, 4, None), (1, 1, None)]
)
def test_each_rank_begins_elsewhere(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch, cpus: int, ranks: int, jobs: int | None
) -> None:
    told: list[tuple[list[Any], int]] = []
    monkeypatch.setattr(warmup, "build_apart", lambda *given: told.append(given) or [])
    monkeypatch.setattr(warmup.os, "sched_getaffinity", lambda _: set(range(cpus)))
    monkeypatch.setattr(warmup, "get_tensor_model_parallel_world_size", lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(warmup, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        warmup.compile_products(PRODUCTS, 2048, CUDA)
    each = gpu[: len(gpu) // ranks]
    firsts = [len(each) * rank // ranks for rank in range(ranks)]
    expected = [] if jobs is None else [(each[at:] + each[:at], jobs) for at in firsts]
    assert told == expected


def test_failures_of_other_processes_are_told(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "build_apart", lambda *_: ["status 1: no room", "status 1: no"])
    monkeypatch.setattr(warmup.os, "sched_getaffinity", lambda _: {0, 1})
    line = warmup.compile_products(PRODUCTS, 2048, CUDA)
    assert line.endswith("; compiling in other processes failed: status 1: no room")
    assert gpu  # compiled here


N, MOST = 160, 300
LINEAR = Layer("", N, K, shards=3, bias=True)


class Launches:
    """Recorder of launched kernels, which are not run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        self.kernels: set[Any] = set()
        for module in modules:
            monkeypatch.setattr(module, "launch", lambda kernel, *_: self.kernels.add(kernel))


def warmed_up(family: str, layer: Layer, activation: Any, terms: int = 1) -> set[Any]:
    product = Product(family, layer, "bfloat16", activation, terms)
    specs = warmup.product_kernels([product], MOST, SM_COUNTS[family])
    return {spec.kernel() for spec in specs}


def test_kernels_are_those_that_products_launch(
    bound: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvfp4_kernels.formats.fragments import fragment_shapes
    from nvfp4_kernels.gemm.sm90 import launch as product

    launches = Launches(monkeypatch, product)
    weight = [torch.zeros(shape, dtype=torch.uint8) for shape in fragment_shapes(N, K)]
    x, bias = torch.zeros(MOST, K).bfloat16(), torch.zeros(N).bfloat16()
    kernel = f"{product.__name__}:gemm"
    with standing_in("cpu", "sm_90"):
        for m in range(1, MOST + 1):
            operands = x[:m], None, None, *weight, torch.ones(3), [96, 32, 32], None, bias
            linear(*operands, kernel, None, 1, x.dtype)
    assert warmed_up("sm_90", LINEAR, "16-bit") == launches.kernels


@pytest.mark.parametrize("activation", ["static", "per-token"])
@pytest.mark.parametrize(
    ("pair", "out_terms"),
    [(False, 0), (True, 0), (True, 1)],
    ids=["linear", "pair", "pair to FP8"],
)
def test_kernels_of_fp8_are_those_that_layers_launch(
    bound: None, pair: bool, out_terms: int, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvfp4_kernels.formats.folded import folded_shapes
    from nvfp4_kernels.gemm.sm90 import launch as product
    from nvfp4_kernels.quantize import sm90 as quantize

    launches = Launches(monkeypatch, product, quantize)
    shapes = zip(folded_shapes(N, K), (torch.uint8, torch.int32), strict=True)
    data, scales = (torch.zeros(2, *shape, dtype=dtype) for shape, dtype in shapes)
    x, bias = torch.zeros(MOST, K).bfloat16(), torch.zeros(N).bfloat16()
    alpha, scale = torch.ones(2, N), torch.tensor(1.0)
    input_scale = scale if activation == "static" else None
    kernel, pair_kernel = (f"{product.__name__}:{op}" for op in ("gemm", "silu_mul_gemm"))
    quantizer = f"{quantize.__name__}:quantize"
    with standing_in("cpu", "sm_90"):
        for m in range(1, MOST + 1):
            both = x[:m], None, None, data, scales, alpha, N, input_scale, pair_kernel
            if out_terms:
                silu_mul_linear_fp8(*both, quantizer, 1, scale)
            elif pair:
                silu_mul_linear(*both, quantizer, 1, x.dtype)
            else:
                one = x[:m], None, None, data[0], scales[0], alpha[0], [96, 32, 32], input_scale
                linear(*one, bias, kernel, quantizer, 1, x.dtype)
    layer = Layer("", N, K, gate_up=True, out_terms=out_terms) if pair else LINEAR
    asked: Any = activation
    specs = warmup.product_kernels(
        [Product("sm_90", layer, "bfloat16", asked, fp8=True)], MOST, SM_COUNTS["sm_90"]
    )
    assert {spec.kernel() for spec in specs} == launches.kernels


def test_kernels_of_norms_to_fp8(bound: None) -> None:
    for per_token in (False, True):
        key = Norm("bfloat16", "bfloat16", K, per_token, 1, fp8=True)
        specs = warmup.product_kernels([key], MOST, SM_COUNTS["sm_90"])
        assert [spec.fields[2:4] for spec in specs] == [(False, per_token), (True, per_token)]


@pytest.mark.parametrize(
    ("activation", "terms"), [("static", 1), ("static", 2), ("per-token", 1), ("per-token", 3)]
)
@pytest.mark.parametrize(
    ("pair", "out_terms"),
    [(False, 0), (True, 0), (True, 1), (True, 2)],
    ids=["linear", "pair", "pair to NVFP4", "pair to two terms"],
)
def test_kernels_on_blackwell_are_those_that_layers_launch(
    pair: bool, out_terms: int, activation: str, terms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.cutlass_or_skip()
    with devices.emulated(EAGER, "sm_100"):
        from nvfp4_kernels.gemm.sm100 import launch as product
        from nvfp4_kernels.quantize import sm100 as quantize

        launches = Launches(monkeypatch, product, quantize)
        data, scales = torch.zeros(2, N, K // 2, dtype=torch.uint8), blocked_shape(N, K // 16)
        weight_scales = torch.zeros(2, *scales).to(torch.float8_e4m3fn)
        x, bias = torch.zeros(MOST, K).bfloat16(), torch.zeros(N).bfloat16()
        input_scale = torch.tensor(1.0) if activation == "static" else None
        kernel, pair_kernel = (f"{product.__name__}:{op}" for op in ("gemm", "silu_mul_gemm"))
        quantizer = f"{quantize.__name__}:quantize"
        with standing_in("cpu", "sm_100"):
            for m in range(1, MOST + 1):
                rows = x[:m], None, None
                both = data, weight_scales, torch.ones(2), N, input_scale
                how = pair_kernel, quantizer, terms
                if out_terms:
                    silu_mul_linear_quantized(*rows, *both, *how, torch.tensor(1.0), out_terms)
                elif pair:
                    silu_mul_linear(*rows, *both, *how, x.dtype)
                else:
                    single = data[0], weight_scales[0], torch.ones(3), [96, 32, 32]
                    linear(*rows, *single, input_scale, bias, kernel, quantizer, terms, x.dtype)
        layer = Layer("", N, K, gate_up=True, out_terms=out_terms) if pair else LINEAR
        assert warmed_up("sm_100", layer, activation, terms) == launches.kernels


def test_after_the_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(startup, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(startup.logger, "info", lambda _, *words: told.append(words[-1]))
    monkeypatch.setattr(warmup, "compile_products", lambda *given: f"{given[1]} tokens")
    warned: list[str] = []
    monkeypatch.setattr(startup.logger, "warning", lambda _, *words: warned.append(words[-1]))
    process = Startup()
    process.products, process.max_tokens, process.pending = {"a": PRODUCTS[0]}, 77, {"a", "b"}
    process.expect_match("ignore", ["nothing"])
    process.loaded("a", CUDA)
    assert not told
    process.loaded("b", CUDA)
    assert told == ["77 tokens"]
    [warning] = warned
    assert warning.startswith("nvfp4_tc.ignore: 'nothing' covers no layer")
    process.loaded("b", torch.device("cpu"))  # nothing to compile for
    assert told == ["77 tokens"]
