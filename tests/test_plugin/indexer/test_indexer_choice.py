"""Choice of the plugin's indexer: served cases, bytes of a key, and refusals at start by name."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nvfp4_kernels.devices import standing_in
from tests.test_kernels.indexer.indexer_oracle import FORMATS
from tests.test_plugin.indexer.indexer_layer import BLOCK_SIZE, CACHE, HEAD_DIM
from tests.test_plugin.indexer.indexer_v32 import ask_for

KEY_BYTES = {"nvfp4": 72, "mxfp4": 68, "fp8": 132, "bf16": 256, None: 132}


def build(vllm_config: Any, fmt: str | None, **changes: Any) -> Any:
    """Build ``SparseAttnIndexer`` as DeepSeek V3.2 does, except for ``changes``."""
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    if fmt != "nothing":
        ask_for(vllm_config, fmt)
    cache = DeepseekV32IndexerCache(132, torch.uint8, CACHE, vllm_config.cache_config)
    given = {
        "quant_block_size": 128,
        "scale_fmt": "ue8m0",
        "topk_tokens": 2048,
        "head_dim": HEAD_DIM,
        "max_model_len": 4096,
        "max_total_seq_len": 20 * 4096,
        "topk_indices_buffer": torch.empty(8, 2048, dtype=torch.int32),
    }
    return SparseAttnIndexer(cache, **given | changes)


# --- the cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", KEY_BYTES)
def test_cache_spec(fmt: str | None, indexer_config: Any) -> None:
    """The page size matches vLLM's allocation, alone and in a group with the model's own cache."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, UniformTypeKVCacheSpecs

    spec = build(indexer_config, fmt).k_cache.get_kv_cache_spec(indexer_config)
    assert (spec.dtype, spec.num_kv_heads, spec.block_size) == (torch.uint8, 1, BLOCK_SIZE)
    assert spec.page_size_bytes == BLOCK_SIZE * KEY_BYTES[fmt]
    latent = MLAAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )
    group = UniformTypeKVCacheSpecs.from_specs({"latent": latent, CACHE: spec})
    assert group is not None
    assert group.page_size_bytes == spec.page_size_bytes + BLOCK_SIZE * 1152


# --- without DeepGEMM ---------------------------------------------------------------------------


def test_needs_no_deep_gemm(indexer_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin's indexer is built without DeepGEMM, where vLLM's class would refuse."""
    from vllm.model_executor.layers import sparse_attn_indexer as theirs

    monkeypatch.setattr(theirs, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(theirs, "has_deep_gemm", lambda: False)
    assert build(indexer_config, None).selector.fmt.name == "fp8"


def test_splits_piecewise_graphs(indexer_config: Any) -> None:
    indexer_config.compilation_config.splitting_ops = ["vllm::sparse_attn_indexer"]
    build(indexer_config, None)
    assert indexer_config.compilation_config.splitting_ops == [
        "vllm::sparse_attn_indexer",
        "nvfp4_tc::select_keys",
    ]


# --- unsupported indexers -----------------------------------------------------------------------


def _parallel(**sizes: int) -> Callable[[Any], None]:
    return lambda config: vars(config.parallel_config).update(sizes)


def _half(config: Any) -> None:
    config.model_config.dtype = torch.float16


OBSTACLES: dict[str, tuple[str, dict[str, Any], Callable[[Any], None], str]] = {
    "head_dim": ("bf16", {"head_dim": 80}, lambda _: None, "head_dim: D is 80, must be a multiple"),
    "fp8 head_dim": ("fp8", {"head_dim": 64}, lambda _: None, "head_dim: is 64, with fp8 must be"),
    "top_k": ("nvfp4", {"topk_tokens": 8192}, lambda _: None, "top_k: is 8192, must be from 1 to"),
    "stored": (
        "nvfp4", {"skip_k_cache_insert": True}, lambda _: None,
        "has stored its keys in fp8 already; choose fp8",
    ),
    "stored in another": (
        "mxfp4", {"skip_k_cache_insert": True}, lambda _: None,
        'in fp8 already; serve with --attention-config \'{"indexer_kv_dtype": "mxfp4"}\'',
    ),
    "two levels": (
        "fp8", {"candidate_blocks": torch.empty(0)}, lambda _: None,
        "choosing keys among candidate blocks (DeepSeek V4.1) is not supported",
    ),
    "dcp": (
        "nvfp4", {}, _parallel(decode_context_parallel_size=2),
        "--decode-context-parallel-size is 2, must be 1; parallelise over tensors",
    ),
    "pcp": (
        "nvfp4", {}, _parallel(prefill_context_parallel_size=2),
        "--prefill-context-parallel-size is 2, must be 1; parallelise over tensors",
    ),
    "dtype": ("nvfp4", {}, _half, "dtype is torch.float16, must be torch.bfloat16; serve with"),
}  # fmt: skip


@pytest.mark.parametrize("case", OBSTACLES)
def test_refused_if_asked_for(case: str, indexer_config: Any) -> None:
    from vllm_fp4_plugin.indexer.choice import UnsupportedIndexer

    fmt, changes, change, message = OBSTACLES[case]
    change(indexer_config)
    with pytest.raises(UnsupportedIndexer) as refused:
        build(indexer_config, fmt, **changes)
    assert str(refused.value).startswith(f"nvfp4_tc.indexer_format: is '{fmt}', which cannot be")
    assert message in str(refused.value)
    assert str(refused.value).endswith("or leave the option out, for vLLM's own kernels")


NOT_ASKED_FOR = [name for name in OBSTACLES if "stored" not in name and "pcp" not in name]


@pytest.mark.parametrize("case", [*NOT_ASKED_FOR, "no kernel"])
def test_left_to_vllm_otherwise(
    case: str, indexer_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers import sparse_attn_indexer as theirs

    _, changes, change, _ = OBSTACLES.get(case, ("", {}, lambda _: None, ""))
    if case == "head_dim":
        changes = {"head_dim": 80, "quant_block_size": 80}
    change(indexer_config)
    monkeypatch.setattr(theirs, "get_dcp_group", lambda: SimpleNamespace(rank_in_group=0))
    with standing_in("cpu", "sm_80" if case == "no kernel" else "cpu"):
        op = build(indexer_config, None, **changes)
    assert op.selector is None
    assert op.k_cache.head_dim == 132
    calls = []
    op._forward_method = lambda *given: calls.append(given)
    op(1, 2, 3, 4)
    assert calls == [(1, 2, 3, 4)]


EXPONENTS = "the model's layer stores FP8 keys with four UE8M0 scales on this GPU, must be one"


@pytest.fixture(params=["this GPU's", "a planned one's"])
def exponent_scales(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Emulate a vLLM that writes scales as exponents on Blackwell, as vLLM 0.33 does."""
    from vllm.utils import deep_gemm

    from vllm_fp4_plugin.device import planned_for

    here = request.param == "this GPU's"
    monkeypatch.setattr(deep_gemm, "mqa_logits_use_mx_scales", lambda: here, raising=False)
    with planned_for("" if here else "sm_100"):
        yield


@pytest.mark.usefixtures("exponent_scales")
@pytest.mark.parametrize("fmt", [None, *FORMATS])
def test_keys_that_ours_store_where_vllm_stores_exponents(
    fmt: str | None, indexer_config: Any
) -> None:
    """Keys that the plugin stores have float32 scales."""
    assert build(indexer_config, fmt).selector.fmt.name == (fmt or "fp8")


@pytest.mark.usefixtures("exponent_scales")
def test_stored_exponents(indexer_config: Any) -> None:
    """FP8 keys of DeepSeek V4 are left to vLLM or refused; MXFP4 keys have one form everywhere."""
    from vllm_fp4_plugin.indexer.choice import IndexerTraits, UnsupportedIndexer, choose

    traits = IndexerTraits("fp8", HEAD_DIM, 2048, 128, stored_by_model=True, two_level=False)
    fmt, why = choose(traits, indexer_config)
    assert fmt is None
    assert why.startswith(EXPONENTS)
    with pytest.raises(UnsupportedIndexer, match=EXPONENTS):
        build(indexer_config, "fp8", skip_k_cache_insert=True)
    indexer_config.additional_config = {}
    ask_for(indexer_config, None)
    fmt, _ = choose(replace(traits, native="mxfp4"), indexer_config)
    assert fmt is not None
    assert fmt.name == "mxfp4"


@pytest.mark.usefixtures("exponent_scales")
def test_stored_exponents_are_left_to_vllm(
    indexer_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers import sparse_attn_indexer as theirs

    monkeypatch.setattr(theirs, "get_dcp_group", lambda: SimpleNamespace(rank_in_group=0))
    assert build(indexer_config, None, skip_k_cache_insert=True).selector is None


def test_fp8_keys_of_another_gpu(indexer_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils import deep_gemm

    monkeypatch.setattr(deep_gemm, "mqa_logits_use_mx_scales", lambda: False, raising=False)
    op = build(indexer_config, None, skip_k_cache_insert=True)
    assert op.selector.fmt.name == "fp8"


def test_other_methods_are_left_to_vllm(
    indexer_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines with another quantization method keep vLLM's indexer."""
    from vllm.model_executor.layers import sparse_attn_indexer as theirs

    monkeypatch.setattr(theirs, "get_dcp_group", lambda: SimpleNamespace(rank_in_group=0))
    indexer_config.model_config.quantization = "fp8"
    assert build(indexer_config, "nothing").selector is None


def test_a_device_without_kernels(indexer_config: Any) -> None:
    from vllm_fp4_plugin.indexer.choice import UnsupportedIndexer

    with (
        standing_in("cpu", "sm_80"),
        pytest.raises(UnsupportedIndexer, match=r"no nvfp4 kernel for"),
    ):
        build(indexer_config, "nvfp4")


def test_an_unknown_format(indexer_config: Any) -> None:
    from vllm_fp4_plugin.options import InvalidOption

    with pytest.raises(InvalidOption, match="indexer_format: is 'fp4', must be one of nvfp4, mxfp"):
        build(indexer_config, "fp4")


def test_queries_in_another_format(indexer_config: Any) -> None:
    """An unknown layer that quantises its queries is refused in vLLM's profiling run at start."""
    from vllm.forward_context import set_forward_context

    from vllm_fp4_plugin.indexer.choice import UnsupportedIndexer

    op = build(indexer_config, "nvfp4")
    q = torch.zeros(8, 4, HEAD_DIM, dtype=torch.float8_e4m3fn)
    k, weights = torch.zeros(8, HEAD_DIM).bfloat16(), torch.zeros(8, 4)
    with (
        set_forward_context(None, indexer_config),
        pytest.raises(
            UnsupportedIndexer, match=r"is 'nvfp4', but .* queries to fp8, .* choose 'fp8'"
        ),
    ):
        op(torch.empty(8, 1), q, k, weights)
