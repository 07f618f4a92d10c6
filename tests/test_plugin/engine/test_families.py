"""Architecture families: sm_100's kernels serve sm_103 with its own SM count; sm_120 is refused."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

from nvfp4_kernels import NoKernelError
from nvfp4_kernels.devices import SM_COUNTS, standing_in
from nvfp4_kernels.precompile.model import Layer
from tests.test_plugin.linear.test_linear_layers import K, checkpoint, gate_up
from vllm_fp4_plugin import warmup
from vllm_fp4_plugin.attention import choice as attention_choice
from vllm_fp4_plugin.attention.capability import DECODE, IMPLEMENTATIONS, PAGED, implementation
from vllm_fp4_plugin.attention.hopper import HopperAttentionImpl
from vllm_fp4_plugin.attention.impl import PagedAttentionImpl
from vllm_fp4_plugin.attention.warmup import layer_kernels
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.indexer import choice as indexer_choice
from vllm_fp4_plugin.warmup import Product

CPU = torch.device("cpu")
B300_SMS = SM_COUNTS["sm_103"]
INDEXER = indexer_choice.IndexerTraits(
    native="fp8",
    head_dim=128,
    top_k=2048,
    quant_block_size=128,
    stored_by_model=False,
    two_level=False,
)


@pytest.fixture
def b300() -> Iterator[None]:
    with standing_in("cpu", "sm_103"):
        yield


def test_it_has_a_count_of_its_own() -> None:
    assert SM_COUNTS["sm_100"] != B300_SMS


# --- sm_103 -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("vllm_config", "b300")
def test_linear_layers_of_a_b300() -> None:
    config = Nvfp4TcConfig(checkpoint())
    RowParallelLinear(K, 48, bias=False, quant_config=config, prefix="m.down_proj")
    gate_up(config)
    told = [(r.kernel, r.arithmetic, r.reason) for r in config.startup.report.layers]
    assert told == [
        ("nvfp4_gemm/block_scaled (sm_100)", "W4A4 static", ""),
        ("nvfp4_silu_mul_gemm/block_scaled (sm_100)", "W4A4 static", ""),
    ]
    assert {product.family for product in config.startup.products.values()} == {"sm_100"}


@pytest.mark.usefixtures("vllm_config", "b300")
def test_eight_shards_are_the_most_of_a_b300() -> None:
    config = Nvfp4TcConfig(checkpoint())
    with pytest.raises(ValueError, match="joins 9 projections, must join at most 8 on sm_100"):
        MergedColumnParallelLinear(K, [16] * 9, bias=False, quant_config=config, prefix="m.f")


@pytest.mark.usefixtures("b300")
def test_products_of_a_b300_are_chosen_for_its_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(warmup, "compile_kernels", lambda specs, _: compiled.extend(specs) or "")
    products = [Product("sm_100", Layer("", 19200, 2048), "bfloat16", "static")]
    warmup.compile_products(products, 64, CPU)
    assert compiled == warmup.product_kernels(products, 64, B300_SMS)
    assert compiled != warmup.product_kernels(products, 64, SM_COUNTS["sm_100"])


@pytest.mark.usefixtures("b300")
def test_attention_of_a_b300() -> None:
    ours = implementation()
    assert ours is PAGED
    assert ours.label("auto") == "nvfp4_paged_attention/FmhaSm100 (sm_100)"
    assert ours.label("fp8") == "nvfp4_paged_attention_fp8_kv/FmhaSm100 (sm_100)"
    assert 128 in ours.head_sizes("auto")
    with standing_in("cpu", "sm_100"):
        for dtype in ("auto", "fp8"):
            assert implementation().head_sizes(dtype) == PAGED.head_sizes(dtype)


@pytest.mark.usefixtures("b300")
def test_attention_of_a_b300_is_chosen_for_its_sms() -> None:
    told: list[Any] = []
    layer: Any = SimpleNamespace(kernels=lambda *given: told.append(given) or ["a", "a", "b"])
    assert layer_kernels([layer, layer], torch.bfloat16, 16, CPU) == ["a", "b"]
    assert told == [(torch.bfloat16, 16, B300_SMS)] * 2


@pytest.mark.usefixtures("b300")
def test_the_indexer_of_a_b300(vllm_config: Any) -> None:
    vllm_config.additional_config = {"nvfp4_tc": {"indexer_format": "nvfp4"}}
    fmt, _ = indexer_choice.choose(INDEXER, vllm_config)
    assert fmt is not None
    assert indexer_choice.scoring_kernel(fmt).arch == "sm_100"


# --- sm_120 -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("weight_only", [False, True], ids=["w4a4", "w4a16"])
def test_linear_layers_of_sm_120_are_refused(weight_only: bool) -> None:
    mode = "w4a16" if weight_only else "w4a4"
    message = rf"gemm: no {mode} kernel for cpu \(sm_120\); there is .*; run on one of those"
    config = Nvfp4TcConfig(checkpoint(weight_only=weight_only))
    with standing_in("cpu", "sm_120"), pytest.raises(NoKernelError, match=message):
        RowParallelLinear(K, 48, bias=False, quant_config=config, prefix="m.down_proj")


def test_attention_of_sm_120_is_refused(vllm_config: Any) -> None:
    with standing_in("cpu", "sm_120"):
        [reason] = attention_choice.unsupported_reasons(vllm_config)
        assert implementation().head_sizes("auto") == ()
    assert reason.startswith("paged_attention: no float kernel for cpu (sm_120); there is ")


def test_the_indexer_of_sm_120_is_refused(vllm_config: Any) -> None:
    vllm_config.additional_config = {"nvfp4_tc": {"indexer_format": "nvfp4"}}
    message = r"nvfp4_tc\.indexer_format: is 'nvfp4', .* no nvfp4 kernel for cpu \(sm_120\)"
    with standing_in("cpu", "sm_120"), pytest.raises(ValueError, match=message):
        indexer_choice.choose(INDEXER, vllm_config)


# --- the table --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", IMPLEMENTATIONS)
def test_every_family_has_kernels_and_head_sizes(family: str) -> None:
    with standing_in("cpu", family):
        ours = implementation()
        assert ours.kernel("auto").arch == family
        assert ours.head_sizes("auto")


def test_hopper_decodes_alone() -> None:
    assert IMPLEMENTATIONS["sm_90"] is DECODE
    assert (DECODE.impl, PAGED.impl) == (HopperAttentionImpl, PagedAttentionImpl)
