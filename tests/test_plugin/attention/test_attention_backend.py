"""Cases in which the plugin's attention backend is chosen, and refusals by name at start."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nvfp4_kernels.devices import standing_in

READ = (
    "architecture", "attn_type", "block_size", "cache_dtype", "decode_context_parallel_size",
    "dtype", "hf_text_config", "is_mm_prefix_lm", "model_arch_config",
    "prefill_context_parallel_size", "rswa_window", "tensor_parallel_size", "use_mla",
    "user_specified_block_size",
)  # fmt: skip
PATH = "vllm_fp4_plugin.attention.backend.PagedAttentionBackend"


@pytest.fixture
def custom() -> Any:
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    load_general_plugins()
    return AttentionBackendEnum.CUSTOM


@pytest.fixture
def config(vllm_config: Any, custom: Any) -> Any:
    """Config whose parts a test may change."""
    from vllm.config import AttentionConfig

    vllm_config.attention_config = AttentionConfig()
    for part in ("model_config", "cache_config", "parallel_config"):
        given = getattr(vllm_config, part)
        setattr(vllm_config, part, SimpleNamespace(**_attributes(given)))
    return vllm_config


def _attributes(given: Any) -> dict[str, Any]:
    return {name: getattr(given, name) for name in READ if hasattr(given, name)}


# --- registered ---------------------------------------------------------------------------------


def test_registered(custom: Any) -> None:
    assert custom.get_path() == PATH
    assert custom.get_class().get_name() == "CUSTOM"


def test_another_plugins_backend_is_left_alone(
    custom: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends import registry

    from vllm_fp4_plugin import register
    from vllm_fp4_plugin.attention import choice

    other = registry.AttentionBackendEnum.CPU_ATTN.get_path()
    monkeypatch.setitem(registry._ATTN_OVERRIDES, custom, other)
    register()
    assert custom.get_path() == other
    assert choice.make_default(config) == "another plugin holds the name CUSTOM"
    assert config.attention_config.backend is None


# --- the default --------------------------------------------------------------------------------


def test_is_the_default_of_a_model_it_can_serve(config: Any, custom: Any) -> None:
    from vllm_fp4_plugin.attention import choice

    assert choice.make_default(config) == "by default"
    assert config.attention_config.backend is custom


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"backend": "CPU_ATTN"}, "--attention-backend CPU_ATTN"),
        ({"backend_per_kind": {"full_attention": "CPU_ATTN"}}, "named by backend_per_kind"),
    ],
)
def test_a_named_backend_stays(
    named: dict[str, Any], reason: str, config: Any, custom: Any
) -> None:
    from vllm.config import AttentionConfig

    from vllm_fp4_plugin.attention import choice

    config.attention_config = AttentionConfig(**named)
    assert choice.make_default(config) == reason
    assert config.attention_config.backend is not custom


def test_a_backend_that_vllm_named_is_told(config: Any) -> None:
    """Gemma 4 is the example: its layers have heads of two sizes."""
    from vllm.config import AttentionConfig

    from vllm_fp4_plugin.attention import choice

    _head_size_of_one_layer(config)
    config.attention_config = AttentionConfig(backend="TRITON_ATTN")
    expected = "--attention-backend TRITON_ATTN, or vLLM's for heads of [128, 512]"
    assert choice.make_default(config) == expected


def _part(part: str, **values: Any) -> Callable[[Any], None]:
    return lambda config: vars(getattr(config, part)).update(values)


def _text(**fields: Any) -> Callable[[Any], None]:
    return _part("model_config", hf_text_config=SimpleNamespace(**fields))


def _head_size_of_one_layer(config: Any) -> None:
    layers = [SimpleNamespace(head_size=128), SimpleNamespace(head_size=512)]

    class Architecture:
        head_size, total_num_hidden_layers = 128, 2

        def __getitem__(self, layer: int) -> Any:
            return layers[layer]

    config.model_config.model_arch_config = Architecture()


OBSTACLES: dict[str, tuple[Callable[[Any], None], str]] = {
    "head size": (_head_size_of_one_layer, "head size is 512, must be one of 16, 32, "),
    "float32": (
        _part("model_config", dtype=torch.float32),
        "dtype is torch.float32, must be bfloat16 or float16",
    ),
    "other 16-bit cache": (
        _part("cache_config", cache_dtype="float16"),
        "kv-cache-dtype is float16, must be the model's bfloat16, or fp8",
    ),
    "e5m2": (
        _part("cache_config", cache_dtype="fp8_e5m2"),
        "kv-cache-dtype is fp8_e5m2, must be one of auto, bfloat16, float16, fp8, fp8_e4m3",
    ),
    "nvfp4": (_part("cache_config", cache_dtype="nvfp4"), "kv-cache-dtype is nvfp4, must be one"),
    "block size": (
        _part("cache_config", user_specified_block_size=True, block_size=40),
        "block-size is 40, must be a multiple of 16",
    ),
    "mla": (_part("model_config", use_mla=True), "MLA not supported"),
    "encoder": (_part("model_config", attn_type="encoder_only"), "encoder_only attention is not"),
    "cross": (_part("model_config", attn_type="encoder_decoder"), "encoder_decoder attention is"),
    "image tokens": (_part("model_config", is_mm_prefix_lm=True), "multimodal token full"),
    "rswa": (_part("model_config", rswa_window=128), "R-SWA not supported"),
    "alibi": (
        _part("model_config", hf_text_config=SimpleNamespace(model_type="bloom")),
        "linear biases (ALiBi) are not supported",
    ),
    "latent attention that vLLM's configs do not tell": (
        _text(model_type="sarvam_mla", kv_lora_rank=32),
        "MLA not supported",
    ),
    "lookback": (
        _part(
            "model_config",
            architecture="Rnj1ForCausalLM",
            hf_text_config=SimpleNamespace(model_type="rnj1", layer_types=["chunked_attention"]),
        ),
        "chunks with lookback are not supported",
    ),
    "dcp": (_part("parallel_config", decode_context_parallel_size=2), "DCP not supported"),
    "pcp": (_part("parallel_config", prefill_context_parallel_size=2), "PCP not supported"),
}


@pytest.mark.parametrize(("change", "reason"), OBSTACLES.values(), ids=OBSTACLES.keys())
def test_is_not_the_default_where_it_cannot_serve(
    change: Callable[[Any], None], reason: str, config: Any
) -> None:
    from vllm_fp4_plugin.attention import choice

    change(config)
    said = choice.make_default(config)
    assert said.startswith("not CUSTOM: ")
    assert reason in said
    assert config.attention_config.backend is None


def test_is_not_the_default_without_a_kernel(config: Any) -> None:
    from vllm_fp4_plugin.attention import choice

    with standing_in("cpu", "sm_80"):
        assert "paged_attention: no float kernel for cpu (sm_80)" in choice.make_default(config)
    assert config.attention_config.backend is None


def _architecture(head_size: int, heads: int) -> Any:
    return SimpleNamespace(
        head_size=head_size, total_num_hidden_layers=0, total_num_attention_heads=heads,
        total_num_kv_heads=2,
    )  # fmt: skip


@pytest.fixture
def hopper(config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Config of a supported model on a Hopper GPU."""
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda: 3)
    config.model_config.model_arch_config = _architecture(64, 4)
    with standing_in("cpu", "sm_90"):
        yield config


def test_is_the_default_on_hopper(hopper: Any, custom: Any) -> None:
    from vllm_fp4_plugin.attention import choice

    assert choice.make_default(hopper) == "by default"
    assert hopper.attention_config.backend is custom


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "granite"},
        {"model_type": "granite", "layer_types": ["full_attention"], "attention_sinks": False},
        {"model_type": "mimo_v2", "add_swa_attention_sink_bias": False},
    ],
    ids=["granite", "granite without", "mimo without"],
)
def test_models_that_may_have_sinks_and_have_none(fields: dict[str, Any], hopper: Any) -> None:
    from vllm_fp4_plugin.attention import choice

    _text(**fields)(hopper)
    assert choice.make_default(hopper) == "by default"


def test_blackwell_and_cpu_serve_sinks(config: Any) -> None:
    from vllm_fp4_plugin.attention import choice

    _text(model_type="gpt_oss")(config)
    assert choice.make_default(config) == "by default"


def test_needs_flash_attention_on_hopper(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import fa_utils

    from vllm_fp4_plugin.attention import choice

    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda: 2)
    reason = "there is no FlashAttention 3 (vLLM) here, which prefills on sm_90"
    assert choice.make_default(hopper) == f"not CUSTOM: {reason}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            _part("model_config", model_arch_config=_architecture(64, 34)),
            "17 query heads share a KV head, must be at most 16",
        ),
        (
            _part("cache_config", cache_dtype="fp8"),
            "an FP8 KV cache has not run with it on a GPU of this kind; --attention-backend CUSTOM",
        ),
        (
            _part("model_config", model_arch_config=_architecture(96, 4)),
            "heads of 96 have not run with it on a GPU of this kind; --attention-backend CUSTOM",
        ),
        (
            _part("model_config", model_arch_config=_architecture(80, 4)),
            "head size is 80, must be one of 64, 96, 128, 192, 256",
        ),
        (_text(model_type="gpt_oss"), "attention sinks are not supported"),
        (_text(model_type="mimo_v2", add_swa_attention_sink_bias=True), "attention sinks are not"),
        (_text(model_type="granite", layer_types=["sliding_attention"]), "attention sinks are not"),
        (_text(model_type="granite", attention_sinks=True), "attention sinks are not supported"),
    ],
    ids=[
        "group",
        "fp8",
        "untried head size",
        "head size",
        "sinks",
        "a flag",
        "layer types",
        "sinks of Granite",
    ],
)
def test_is_not_the_default_on_hopper(
    change: Callable[[Any], None], reason: str, hopper: Any
) -> None:
    from vllm_fp4_plugin.attention import choice

    change(hopper)
    assert reason in choice.make_default(hopper)


@pytest.mark.parametrize(
    ("dtype", "arch", "label"),
    [
        ("auto", "cpu", "nvfp4_paged_attention/reference (cpu)"),
        ("fp8", "cpu", "nvfp4_paged_attention_fp8_kv/reference (cpu)"),
        ("bfloat16", "sm_100", "(sm_100)"),
    ],
)
def test_the_table_names_the_kernel(dtype: str, arch: str, label: str) -> None:
    from vllm_fp4_plugin.attention.capability import implementation

    with standing_in("cpu", arch):
        assert implementation().kernel(dtype).label.endswith(label)


# --- named, and refused ---------------------------------------------------------------------------


def test_layer_that_cannot_be_served_is_refused(custom: Any) -> None:
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from vllm_fp4_plugin.engine.cpu_platform import Nvfp4CpuPlatform

    choose = Nvfp4CpuPlatform.get_attn_backend_cls
    fits = AttentionSelectorConfig(64, torch.bfloat16, "auto", None, has_sliding_window=True)
    assert choose(custom, fits) == PATH
    with pytest.raises(
        ValueError,
        match=r"CUSTOM, which cannot serve a layer: head size is 40, .*MLA not supported; "
        "serve with --attention-backend CPU_ATTN",
    ):
        choose(custom, fits._replace(head_size=40, use_mla=True))


@pytest.mark.parametrize(
    ("head_size", "cache", "reasons"),
    [
        (128, "auto", []),
        (64, "fp8", []),
        (16, "auto", []),
        (
            16,
            "fp8",
            [
                "head size is 16, with kv-cache-dtype fp8 must be one of "
                "32, 64, 96, 128, 160, 192, 224, 256"
            ],
        ),
        (80, "auto", []),
    ],
)
def test_head_sizes_of_sm_100(head_size: int, cache: str, reasons: list[str], custom: Any) -> None:
    from vllm.v1.attention.selector import AttentionSelectorConfig

    given = AttentionSelectorConfig(head_size, torch.bfloat16, cache, None)  # type: ignore[arg-type]
    with standing_in("cpu", "sm_100"):
        found = custom.get_class().validate_configuration(device_capability=None, **given._asdict())
    assert found == reasons


def test_head_sizes_are_the_kernels() -> None:
    from nvfp4_kernels.attention.kernels import HEAD_DIMS
    from nvfp4_kernels.attention.sm100.tile import AttentionTile

    for mode, fp8 in (("float", False), ("fp8_kv", True)):
        served = HEAD_DIMS["sm_100", mode]  # type: ignore[index]
        for head_dim in range(8, 300, 8):
            if head_dim in served:
                assert AttentionTile(head_dim, fp8=fp8).stages >= 2
            else:
                with pytest.raises(AssertionError):
                    AttentionTile(head_dim, fp8=fp8)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "alibi": ({"alibi_slopes": [0.5]}, r"alibi_slopes: linear biases \(ALiBi\) are not supported"),
    "encoder": ({"attn_type": "encoder_only"}, "attn_type: encoder_only attention is not"),
    "cross": ({"attn_type": "encoder_decoder"}, "attn_type: encoder_decoder attention is not"),
    "lookback": ({"chunk_lookback": 1}, "chunk_lookback: chunks with lookback are not supported"),
    "further": ({"use_alibi_sqrt": 1}, "use_alibi_sqrt: this option is not supported"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_impl_refuses(arguments: dict[str, Any], message: str) -> None:
    from vllm_fp4_plugin.attention.impl import PagedAttentionImpl

    with pytest.raises(ValueError, match=message + ".*CPU_ATTN on CPU or TRITON_ATTN on CUDA"):
        PagedAttentionImpl(4, 64, 0.125, 2, **arguments)


CONFIG: Any = SimpleNamespace(
    speculative_config=None,
    parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    compilation_config=SimpleNamespace(max_cudagraph_capture_size=4),
    scheduler_config=SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=64),
    cache_config=SimpleNamespace(enable_prefix_caching=False),
)


def test_builder_refuses_values_of_another_width() -> None:
    with pytest.raises(ValueError, match="attn: values have head size 64, keys 128"):
        builder(head_size_v=64)


def builder(head_size_v: int = 128) -> Any:
    from vllm_fp4_plugin.attention.metadata import PagedAttentionMetadataBuilder

    spec = SimpleNamespace(head_size=128, head_size_v=head_size_v, num_kv_heads=2)
    return PagedAttentionMetadataBuilder(spec, ["attn"], CONFIG, torch.device("cpu"))


def batch(**changes: Any) -> Any:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    ints = torch.zeros(2, dtype=torch.int32)
    values: dict[str, Any] = {
        "query_start_loc": ints, "query_start_loc_cpu": ints, "seq_lens": ints[:1], "num_reqs": 1,
        "num_actual_tokens": 0, "max_query_len": 0, "max_seq_len": 0,
        "block_table_tensor": ints[None, :1], "slot_mapping": ints[:0].long(),
    }  # fmt: skip
    return CommonAttentionMetadata(**(values | changes))


def test_builder_refuses_cascade_and_attention_to_later_tokens() -> None:
    with pytest.raises(ValueError, match="common_prefix_len: is 16, must be 0; cascade attention"):
        builder().build(16, batch())
    for causal in (False, torch.ones(1, dtype=torch.bool)):
        with pytest.raises(ValueError, match="causal: attention to later tokens"):
            builder().build(0, batch(causal=causal))


def test_groups_of_layers_differ_in_their_table_alone() -> None:
    """Layers with a window have another block table than layers without; the rest is shared."""
    starts = torch.tensor([0, 1, 2, 9], dtype=torch.int32)
    common = batch(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=starts[1:], num_reqs=3,
        num_actual_tokens=9, max_query_len=7, block_table_tensor=starts[:3, None],
    )  # fmt: skip
    built = builder().build(0, common)
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    updated = builder().update_block_table(built, table, torch.zeros(0))
    tables = [part.block_table.tolist() for part in updated.parts]
    assert tables == [table[:2].tolist(), table[2:].tolist()]
    assert [p.seq_lens for p in updated.parts] == [p.seq_lens for p in built.parts]


def test_prefill_of_shared_caches_is_described_alike() -> None:
    """The builder is wrapped by vLLM where layers that share a cache skip most of a prefill."""
    from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

    from vllm_fp4_plugin.attention.backend import PagedAttentionBackend

    backend = create_fast_prefill_custom_backend("FastPrefill", PagedAttentionBackend)
    assert issubclass(backend, PagedAttentionBackend)
    spec = SimpleNamespace(head_size=64, head_size_v=64, num_kv_heads=2)
    wrapped = backend.get_builder_cls()(spec, ["attn"], CONFIG, torch.device("cpu"))
    starts = torch.tensor([0, 9], dtype=torch.int32)
    common = batch(
        query_start_loc=starts, query_start_loc_cpu=starts, num_actual_tokens=9, max_query_len=9,
        logits_indices_padded=torch.tensor([8]), num_logits_indices=1, max_logits_per_req=1,
    )  # fmt: skip
    built = wrapped.build(0, common)
    [part] = built.parts
    assert part.query_start.tolist() == [0, 1]
    assert part.tokens == slice(0, 1)


def test_impl_refuses_to_quantise_its_output() -> None:
    from vllm_fp4_plugin.attention.impl import PagedAttentionImpl

    x: Any = torch.zeros(1)
    with pytest.raises(ValueError, match=r"output_scale: .*fuse_attn_quant"):
        PagedAttentionImpl(4, 64, 0.125, 2).forward(
            None, x, x, x, x, None, x, output_block_scale=torch.ones(1)
        )


def test_positions_follow_from_lengths_where_vllm_does_not_tell_them() -> None:
    """Positions, in reused memory: the last 3 tokens of 8, the last token of 5, and padding."""
    starts = torch.tensor([0, 3, 4], dtype=torch.int32)
    given = batch(
        query_start_loc=starts, query_start_loc_cpu=starts, num_reqs=2, num_actual_tokens=5,
        max_query_len=3, seq_lens=torch.tensor([8, 5], dtype=torch.int32), positions=None,
        block_table_tensor=torch.zeros(2, 1, dtype=torch.int32),
    )  # fmt: skip
    made = builder()
    made.separates = False
    found = made.build(0, given).positions
    assert found[:4].tolist() == [5, 6, 7, 4]
    assert made.build(0, given).positions.data_ptr() == found.data_ptr()
    told = torch.arange(5)
    assert made.build(0, batch(**vars(given) | {"positions": told})).positions is told
