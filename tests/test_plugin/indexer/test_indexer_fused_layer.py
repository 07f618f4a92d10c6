"""Layer of DeepSeek V3.2 for CUDA: vLLM's own ``forward`` with the plugin's indexer.

The layer's two fused kernels cannot run on a CPU and are reimplemented here; attention itself is
left out.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import indexer_quantize_q, indexer_store_k
from tests.test_plugin.indexer.indexer_layer import (
    CACHE,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LORA,
    PREFIX,
    ROTATED,
    Driver,
    Handed,
    Step,
)
from tests.test_plugin.indexer.indexer_v32 import ask_for, give_weights, rotation, traits, values_of
from vllm_fp4_plugin.indexer.cache import pages

ATTENTION = "model.layers.0.self_attn.attn"
STEPS: list[Step] = [[("a", 5), ("c", 63)], [("a", 1), ("c", 1), ("b", 70)], [("a", 1), ("c", 1)]]


def rotate(x: Tensor, cos_sin: Tensor, positions: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first elements of each vector as complex numbers."""
    cos, sin = cos_sin[positions].double().unsqueeze(1).chunk(2, dim=-1)
    head, rest = x[..., :ROTATED].double(), x[..., ROTATED:]
    half = ROTATED // 2
    pairs = (head[..., ::2], head[..., 1::2]) if interleaved else head.split(half, dim=-1)
    turned = torch.complex(*pairs) * torch.complex(cos, sin)
    dim = -1 if interleaved else -2
    head = torch.stack([turned.real, turned.imag], dim=dim).flatten(-2)
    return torch.cat([head.to(x.dtype), rest], dim=-1)


def _has_exponent_scales() -> bool:
    from vllm.utils import deep_gemm

    return bool(getattr(deep_gemm, "mqa_logits_use_mx_scales", lambda: False)())


def write_exponents(cache: Tensor, slots: Tensor, size: int) -> None:
    """Replace the power-of-two scale of each stored key by four equal UE8M0 bytes."""
    for slot in slots[slots >= 0].tolist():
        page, row = divmod(slot, size)
        scale = cache[page, size * HEAD_DIM + 4 * row :][:4]
        [bits] = scale.clone().view(torch.int32).tolist()
        assert bits & 0x7FFFFF == 0, "a power of two"
        scale.fill_(bits >> 23)


class Kernels:
    """Stand-in for vLLM's fused kernels, limited to the indexer."""

    def __init__(self) -> None:
        self.keys, self.seen = torch.empty(0), torch.empty(0)

    def fused_norm_rope(
        self, positions: Tensor, q_c: Tensor, q_weight: Tensor, q_eps: float, kv_c: Tensor,
        kv_weight: Tensor, kv_eps: float, k_pe: Tensor, k_cos_sin: Tensor, index_k: Tensor,
        weight: Tensor, bias: Tensor, eps: float, cos_sin: Tensor, topk: Tensor, *,
        slot_mapping: Tensor | None = None, indexer_slot_mapping: Tensor | None = None,
        indexer_k_cache: Tensor | None = None, index_rope_interleave: bool = False,
        has_indexer: bool = True, index_k_out: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        if has_indexer:
            topk[: len(positions)] = -1
            k = torch.nn.functional.layer_norm(index_k.float(), (HEAD_DIM,), weight, bias, eps)
            k = k.bfloat16().unsqueeze(1)
            k = rotate(k, cos_sin, positions, interleaved=index_rope_interleave).squeeze(1)
            self.keys = k
            if index_k_out is not None:
                index_k_out.copy_(k)
            if indexer_k_cache is not None:
                assert indexer_slot_mapping is not None
                assert indexer_k_cache.shape[-1] == 132
                where = pages(indexer_k_cache), indexer_slot_mapping
                indexer_store_k(k, *where, "fp8", indexer_k_cache.shape[1])
                if _has_exponent_scales():
                    write_exponents(*where, indexer_k_cache.shape[1])
        return q_c

    def fused_q(
        self, positions: Tensor, q_pe: Tensor, q_cos_sin: Tensor, index_q: Tensor | None,
        cos_sin: Tensor, ql_nope: Tensor, q_scale: Tensor, weights: Tensor,
        softmax_scale: float, head_scale: float, *, has_indexer: bool = True,
        index_rope_interleave: bool = False, quantize_mqa: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert not quantize_mqa
        if not has_indexer:
            assert index_q is None
            return torch.empty(1), torch.empty(1), q_pe
        assert index_q is not None
        q = rotate(index_q, cos_sin, positions, interleaved=index_rope_interleave)
        data, scales = indexer_quantize_q(q, "fp8")
        return data, weights.float() * scales * (softmax_scale * head_scale), q_pe


class FusedLayer(Driver):
    """Driver of ``DeepseekV32Attention.forward``, reduced to its indexer."""

    def __init__(
        self, vllm_config: Any, fmt: str | None, kernels: Kernels, *, interleaved: bool = False
    ) -> None:
        from vllm.models.deepseek_v32 import attention

        fmt = ask_for(vllm_config, fmt)
        buffer = torch.empty(400, 16, dtype=torch.int32)
        self.kernels = kernels
        self.indexer = attention.DeepseekV32Indexer(
            vllm_config, traits(16), HIDDEN, LORA, None, vllm_config.cache_config, buffer,
            prefix=PREFIX,
        )  # fmt: skip
        super().__init__(vllm_config, self.indexer.k_cache, buffer, 16, fmt)
        give_weights(self.indexer, self.random)
        self.rope = rotation(neox=not interleaved)
        self.attention = self._attention(interleaved)
        self.attention._sparse_indexer_and_attn = self._score
        self.forward = attention.DeepseekV32Attention.forward
        self.score = attention.DeepseekV32Attention._sparse_indexer_and_attn
        vllm_config.compilation_config.static_forward_context[ATTENTION] = self.attention

    def _attention(self, interleaved: bool) -> Any:
        norm = SimpleNamespace(weight=None, variance_epsilon=1e-6)
        projected = torch.nn.Linear(HIDDEN, LORA + 16 + ROTATED, bias=False).bfloat16()
        q_b = torch.nn.Linear(LORA, 2 * ROTATED + 2, bias=False).bfloat16()
        return SimpleNamespace(
            fused_qkv_a_proj=lambda x: (projected(x),), q_b_proj=lambda x: (q_b(x),),
            o_proj=lambda x: (x,), q_a_layernorm=norm, kv_a_layernorm=norm,
            rotary_emb=self.rope, indexer_rope_emb=self.rope, indexer=self.indexer,
            topk_indices_buffer=self.buffer, skip_topk=False, use_pcp=False,
            pcp_shard_decode_requests=False, hisparse_cache=None, dcp_manager=None,
            layer_name=ATTENTION, _dense_mha_metadata_layer_name="", kv_cache_dtype="auto",
            q_lora_rank=LORA, kv_lora_rank=16, qk_rope_head_dim=ROTATED, qk_nope_head_dim=1,
            qk_head_dim=ROTATED + 1, num_local_heads=2, v_head_dim=1, kv_cache=torch.empty(0),
            W_UK_T=torch.zeros(2, 1, 16).bfloat16(), _k_scale=None, _k_scale_float=1.0,
            _q_scale=torch.ones(1),
            _fp8_query=False, _index_rope_interleave=interleaved,
            _vllm_config=self.vllm_config, _should_prepare_mqa_query=lambda *_: True,
            impl=SimpleNamespace(
                prepare_for_batch=lambda _: None, record_logical_topk_ready=lambda: None
            ),
        )  # fmt: skip

    def _score(self, *given: Any) -> None:
        self.q, self.weights = given[4], given[6]
        self.score(self.attention, *given)

    def run(self, positions: Tensor, metadata: Any) -> Handed:
        from vllm.forward_context import set_forward_context

        hidden = torch.randn(len(positions), HIDDEN, generator=self.random).bfloat16()
        slots = {ATTENTION: metadata.slot_mapping, CACHE: metadata.slot_mapping}
        steps = {ATTENTION: None, CACHE: metadata}
        with set_forward_context(steps, self.vllm_config, slot_mapping=slots):
            self.forward(self.attention, positions, hidden)
        return Handed(values_of(self.q, self.fmt), self.weights, self.kernels.keys)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Replace vLLM's fused kernels, and reset the layer's module as if just loaded."""
    from vllm.models.deepseek_v32 import attention
    from vllm.models.deepseek_v32.common import kernels as theirs

    fakes = Kernels()
    for name in ("fused_norm_rope", "fused_q"):
        monkeypatch.setattr(theirs, name, getattr(fakes, name))
        monkeypatch.setattr(attention, name, getattr(fakes, name))
    monkeypatch.setattr(attention, "sparse_attn_indexer", attention.sparse_attn_indexer)
    return fakes


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "fp8", "bf16", None])
def test_steps(fmt: str | None, interleaved: bool, indexer_config: Any, kernels: Kernels) -> None:
    layer = FusedLayer(indexer_config, fmt, kernels, interleaved=interleaved)
    for step in STEPS:
        layer.step(step)
    assert layer.q.dtype == (torch.float8_e4m3fn if fmt in ("fp8", None) else torch.bfloat16)


@pytest.fixture
def exponent_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make vLLM's functions answer as on Blackwell from 0.33 on."""
    from vllm.utils import deep_gemm

    monkeypatch.setattr(deep_gemm, "mqa_logits_use_mx_scales", lambda: True, raising=False)


@pytest.mark.usefixtures("exponent_scales")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "fp8", "bf16", None])
def test_steps_where_vllm_stores_exponents(
    fmt: str | None, interleaved: bool, indexer_config: Any, kernels: Kernels
) -> None:
    """The plugin's kernels quantise queries and store keys, FP8 keys included."""
    layer = FusedLayer(indexer_config, fmt, kernels, interleaved=interleaved)
    for step in STEPS:
        layer.step(step)
    assert layer.q.dtype == torch.bfloat16


@pytest.mark.usefixtures("exponent_scales")
def test_exponents_read_as_float32_show(indexer_config: Any, kernels: Kernels) -> None:
    """Mutant: the plugin's kernels read scales that vLLM stored as exponents."""
    from vllm.models.deepseek_v32 import attention

    torch.manual_seed(0)  # keys whose scales are alike would be chosen all the same
    layer = FusedLayer(indexer_config, None, kernels)
    attention.fused_norm_rope = kernels.fused_norm_rope
    prefill, decode = [("c", 200), ("a", 5)], [("c", 1), ("a", 1)]
    for step in (prefill, decode):
        with pytest.raises(AssertionError):
            layer.step(step)


def test_a_report_on_blackwell_serves_fp8(
    indexer_config: Any, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's vLLM cannot tell the planned GPU's key format, so the plugin stores keys."""
    from vllm.models.deepseek_v32 import attention
    from vllm.utils import deep_gemm

    from vllm_fp4_plugin.device import planned_for

    monkeypatch.setattr(deep_gemm, "mqa_logits_use_mx_scales", lambda: False, raising=False)
    with planned_for("sm_100"):
        layer = FusedLayer(indexer_config, None, kernels)
    assert layer.indexer.indexer_op.selector.fmt.name == "fp8"
    assert attention.fused_norm_rope is not kernels.fused_norm_rope


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_are_those_that_vllm_quantises(
    interleaved: bool, indexer_config: Any, kernels: Kernels
) -> None:
    from vllm.models.deepseek_v32 import attention

    layer = FusedLayer(indexer_config, "nvfp4", kernels, interleaved=interleaved)
    table, angles = layer.rope.cos_sin_cache, torch.arange(9) * 7
    q, weights = torch.randn(9, HEADS, HEAD_DIM).bfloat16(), torch.randn(9, HEADS).bfloat16()
    rest = torch.empty(0), torch.ones(1)
    given = angles, torch.empty(3), table, q, table, *rest, weights, 0.25, 0.5
    ways = {"index_rope_interleave": interleaved, "quantize_mqa": False}
    ours, our_weights, mqa_q = attention.fused_q(*given, **ways)
    assert mqa_q is given[1]
    theirs, their_weights, _ = kernels.fused_q(*given, **ways)
    data, scales = indexer_quantize_q(ours, "fp8")
    assert torch.equal(data.float(), theirs.float())
    assert torch.equal(our_weights * scales, their_weights)


def test_layers_that_ours_do_not_serve_keep_vllms_function(
    indexer_config: Any, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.forward_context import set_forward_context
    from vllm.models.deepseek_v32 import attention

    from vllm_fp4_plugin.indexer import fused_layer

    FusedLayer(indexer_config, "nvfp4", kernels)
    assert attention.fused_q is not kernels.fused_q
    fused_layer.install(None)  # as another engine of the process does that it cannot serve
    assert attention.fused_q == kernels.fused_q
    assert attention.fused_norm_rope == kernels.fused_norm_rope
    indexer_config.compilation_config.static_forward_context[CACHE] = torch.nn.Identity()
    given = tuple(range(14))
    monkeypatch.setattr(fused_layer.scoring, "sparse_attn_indexer", lambda *args, **_: args)
    with set_forward_context({}, indexer_config):
        assert attention.sparse_attn_indexer(*given, use_pcp=False) == given
