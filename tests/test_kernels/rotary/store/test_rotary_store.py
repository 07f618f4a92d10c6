"""``rotary_store``: the reference against float64, vLLM's rotation and the unfused ops."""

from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from nvfp4_kernels import InvalidArgument, NoKernelError, rotary_embedding, rotary_store
from nvfp4_kernels.norm.reference import rms_norm
from nvfp4_kernels.rotary.store import op as rotary_op
from nvfp4_kernels.rotary.store import reference
from nvfp4_kernels.rotary.store.kernels import KERNELS
from tests.test_kernels.bits import check_equal
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.rotary.store.rotary_store_cases import (
    BF16,
    CASES,
    E4M3,
    EVERY_CASE,
    FP16,
    FP32,
    Case,
    Given,
    memory,
    on,
)
from vllm_fp4_plugin.attention import cache as plugin_cache

CPU = torch.device("cpu")


def exact(given: Given, name: str) -> tuple[Tensor, Tensor]:
    """Rotated queries or keys in float64, and for each the sum of its addends' magnitudes."""
    tokens = len(given["slot_mapping"])
    x, table = given[name][:tokens].double(), given["cos_sin_cache"].double()
    weight = given.get(f"{name}_norm")
    if weight is not None:
        mean = x.square().mean(-1, keepdim=True)
        x = x / (mean + given["eps"]).sqrt() * weight.double()
    half = table.shape[1] // 2
    result, size = x.clone(), x.abs()
    for i in range(half):
        a, b = (i, i + half) if given["neox"] else (2 * i, 2 * i + 1)
        cos, sin = (table[given["positions"][:tokens]][:, n, None] for n in (i, i + half))
        result[..., a] = x[..., a] * cos - x[..., b] * sin
        result[..., b] = x[..., b] * cos + x[..., a] * sin
        size[..., a] = (x[..., a] * cos).abs() + (x[..., b] * sin).abs()
        size[..., b] = (x[..., b] * cos).abs() + (x[..., a] * sin).abs()
    return result, size


@EVERY_CASE
def test_against_float64(case: Case) -> None:
    """Queries and keys within their roundings; cached values and unstored slots exactly."""
    given = case.arguments()
    before = on(given, CPU)["kv_cache"]
    out = rotary_store(**given)[: case.tokens].double()
    unit, least = torch.finfo(case.dtype).eps / 2, torch.finfo(case.dtype).smallest_normal
    roundings = {"q": 1, "k": 1}
    for name in case.norms:
        roundings[name] += 2  # the normalised value, and its product with the weight
    result, size = exact(given, "q")
    assert bool(((out - result).abs() <= (roundings["q"] + 0.1) * unit * size + least).all())
    cache, width = given["kv_cache"].transpose(1, 2), case.head_dim
    live = given["slot_mapping"] >= 0
    slots = given["slot_mapping"][live]
    rows = slots // case.page_size, slots % case.page_size
    result, size = (x[live] for x in exact(given, "k"))
    allowed = (roundings["k"] + 0.1) * unit * size + least
    keys, values = cache[rows].double().split(width, -1)
    right = given["v"][: case.tokens][live].double()
    if case.fp8:
        k_scale, v_scale = given["k_scale"].double(), given["v_scale"].double()
        result, allowed = result / k_scale, allowed / k_scale
        allowed = allowed + 2.0**-4 * (result.abs() + allowed) + 2.0**-10
        overflown = result.abs() > 448
        result = result.clamp(-448, 448)
        assert bool((keys[overflown].abs() > 400).all())
        scaled = (right / v_scale).clamp(-448, 448)
        assert bool(((values - scaled).abs() <= 2.0**-4 * scaled.abs() + 2.0**-10).all())
    else:
        assert torch.equal(values, right)
    assert bool(((keys - result).abs() <= allowed).all())
    cache[rows] = before.transpose(1, 2)[rows]
    assert torch.equal(memory(given["kv_cache"]), memory(before))


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "neighbours"])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rotation_is_that_of_vllm(neox: bool, rotary_dim: int) -> None:
    """Rotation by vLLM's formula in float32 with the same table, rounded once."""
    given = Case(7, rotary_dim=rotary_dim, neox=neox).arguments()
    q, k, positions = given["q"], given["k"], given["positions"]
    theirs = RotaryEmbedding.forward_static(
        positions, q.float().flatten(1), k.float().flatten(1), 64, rotary_dim,
        given["cos_sin_cache"].float(), is_neox_style=neox,
    )  # fmt: skip
    out = rotary_store(**given)
    slots = given["slot_mapping"]
    keys = given["kv_cache"].transpose(1, 2)[slots // 16, slots % 16][..., :64]
    for ours, other in zip((out, keys), theirs, strict=True):
        assert torch.equal(ours, other.view(ours.shape).to(BF16))


@EVERY_CASE
def test_is_what_it_stands_for(case: Case) -> None:
    """Bit-identical to norms, ``rotary_embedding`` and the plugin's store, where sums are exact."""
    given = case.arguments()
    tokens = case.tokens
    for name in "qk":  # within ±8, so that float32 sums of squares are exact in any order
        given[name] = torch.randint(-8, 9, given[name].shape).to(case.dtype)
    q, k = given["q"][:tokens], given["k"][:tokens]
    weights = given.get("q_norm"), given.get("k_norm")
    q, k = (
        x if weight is None else rms_norm(x.float(), weight, given["eps"], x.dtype)
        for x, weight in zip((q, k), weights, strict=True)
    )
    positions, table = given["positions"][:tokens].long(), given["cos_sin_cache"]
    if case.neox and case.table_dtype == case.dtype:
        q, k = rotary_embedding(positions, q, k, table)
    else:
        rotated = RotaryEmbedding.forward_static(
            positions, q.float().flatten(1), k.float().flatten(1), case.head_dim, case.rotary_dim,
            table.float(), is_neox_style=case.neox,
        )  # fmt: skip
        q, k = (x.view(y.shape).to(case.dtype) for x, y in zip(rotated, (q, k), strict=True))
    cache = on(given, CPU)["kv_cache"]
    scales = given.get("k_scale"), given.get("v_scale")
    as_bytes = cache.view(torch.uint8) if case.fp8 else cache
    plugin_cache.write(k, given["v"], as_bytes, given["slot_mapping"], *scales)
    check_equal([rotary_store(**given)[:tokens]], [q])
    check_equal([memory(given["kv_cache"])], [memory(cache)])


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (80, 32), (256, 64), (24, 8)])
def test_sum_of_squares(head_dim: int, rotary_dim: int) -> None:
    """Every element is added once; the sum is within float32's roundings."""
    x = torch.randn(50, head_dim)
    right = x.double().square().sum(-1)
    found = reference.sum_of_squares(x, rotary_dim).double()
    assert bool(((found - right).abs() <= head_dim * 2.0**-24 * right).all())
    ones = torch.diag(2.0 ** torch.arange(-(head_dim // 2), head_dim - head_dim // 2).float() % 97)
    assert torch.equal(reference.sum_of_squares(ones, rotary_dim), ones.square().sum(-1))


def test_labels() -> None:
    labels = [KERNELS.select(CPU, mode).label for mode in ("float", "fp8_kv")]
    assert labels == [
        "nvfp4_rotary_store/reference (cpu)",
        "nvfp4_rotary_store_fp8_kv/reference (cpu)",
    ]


# --- compilation ------------------------------------------------------------------------------


def positional(given: Given) -> tuple[Any, ...]:
    names = list(given)[:7]
    rest = "q_norm", "k_norm", "k_scale", "v_scale"
    return (*(given[n] for n in (*names,)), *(given.get(n) for n in rest), True, given.get("eps"))


@pytest.mark.parametrize("name", ["Qwen3", "Llama 3 8B, E4M3"])
def test_opcheck(name: str) -> None:
    given = CASES[name].arguments()
    given["kv_cache"] = given["kv_cache"].contiguous()
    out = torch.zeros(given["q"].shape, dtype=BF16)
    check_op(torch.ops.nvfp4.rotary_store.default, (out, *positional(given)))


@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
def test_compiled(in_place: bool) -> None:
    """The cache and the result equal eager mode's, for any number of tokens."""
    fixed = Case(1, norms="qk").arguments()
    del fixed["eps"]
    tokens_have = "q", "k", "v", "positions", "slot_mapping"
    whole = fixed["kv_cache"].contiguous()

    def layer(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        given = {**fixed, **dict(zip(tokens_have, tensors, strict=True)), "kv_cache": whole.clone()}
        out = given["q"] if in_place else None
        return rotary_store(**given, eps=1e-5, out=out), given["kv_cache"]

    calls = []
    for tokens in (7, 40, 33):  # PAGES would be taken for the same size
        given = Case(tokens).arguments()
        calls.append((tuple(given[n].contiguous() for n in tokens_have), {}))
    check_compiled(layer, calls, graphs=1)


# --- errors -----------------------------------------------------------------------------------


def given_tensors() -> Given:
    return {
        "q": torch.zeros(2, 4, 64, dtype=BF16),
        "k": torch.zeros(2, 2, 64, dtype=BF16),
        "v": torch.zeros(2, 2, 64, dtype=BF16),
        "positions": torch.tensor([3, 0]),
        "cos_sin_cache": torch.zeros(8, 64, dtype=BF16),
        "kv_cache": torch.zeros(3, 2, 16, 128, dtype=BF16),
        "slot_mapping": torch.tensor([5, -1]),
    }


GIVEN = given_tensors()
Q, K, POSITIONS, TABLE, CACHE, SLOTS = (
    GIVEN[n] for n in ("q", "k", "positions", "cos_sin_cache", "kv_cache", "slot_mapping")
)
WEIGHT, SCALE = torch.ones(64, dtype=BF16), torch.tensor(1.0)
WIDE = torch.zeros(2, 8, 64, dtype=BF16)
REFUSED: list[tuple[Given, str]] = [
    ({"q": Q.float()}, "q: dtype is float32, must be bfloat16, float16; convert"),
    ({"q": Q[0]}, r"q: shape is \(4, 64\), must be \(T, Hq, D\)"),
    ({"q": Q.mT}, r"q: strides are .*, the last must be 1; call contiguous"),
    ({"q": Q[..., :24]}, "q: D is 24, must be a multiple of 16 from 16 to 256; pad"),
    ({"q": Q[:1]}, "q: has 1 rows, must have at least 2, one per slot of .*; cut slot_mapping"),
    ({"q": Q[:, :3]}, "kv_cache: has 2 heads, q's 3 must be a multiple"),
    ({"k": K.to(FP16)}, "k: dtype is float16, must be bfloat16; convert"),
    ({"k": K[:, :1]}, r"k: shape is \(2, 1, 64\), must be \(2, 2, 64\); a head per head of kv_"),
    ({"v": K[..., :32]}, r"v: shape is \(2, 2, 32\), must be \(2, 2, 64\); .* as wide as q's"),
    ({"v": K[0]}, r"v: shape is \(2, 64\), must be \(2, 2, 64\)"),
    ({"k": K.repeat(1, 1, 2)[..., ::2]}, "k: strides are .* the last must be 1; call contiguous"),
    ({"v": K[:1]}, "v: has 1 rows, must have at least 2"),
    ({"positions": POSITIONS.float()}, "positions: dtype is float32, must be int64, int32; conv"),
    ({"positions": POSITIONS[None]}, r"positions: shape is \(1, 2\), must have 1 dimension"),
    ({"positions": torch.arange(4)[::2]}, r"positions: strides are \(2,\), must be \(1,\); call"),
    ({"positions": POSITIONS[:1]}, "positions: has 1 rows, must have at least 2"),
    ({"positions": POSITIONS - 1}, "positions: holds -1, must be from 0 to 7, the rows of .* make"),
    ({"positions": POSITIONS.int() + 5}, "positions: holds 8, must be from 0 to 7, the rows of"),
    ({"cos_sin_cache": TABLE.to(FP16)}, "cos_sin_cache: dtype is float16, must be bfloat16, floa"),
    ({"cos_sin_cache": TABLE[0]}, r"cos_sin_cache: shape is \(64,\), must be \(P, R\).* reshape"),
    ({"cos_sin_cache": TABLE.repeat(1, 2)}, "cos_sin_cache: R is 128, must be even and .* to 64"),
    ({"cos_sin_cache": TABLE[:, :7]}, "cos_sin_cache: R is 7, must be even and from 2 to 64, q's"),
    ({"cos_sin_cache": TABLE[:, :32]}, r"cos_sin_cache: strides are \(64, 1\).* call contiguous"),
    ({"kv_cache": CACHE.to(FP16)}, "kv_cache: dtype is float16, must be bfloat16, float8_e4m3fn"),
    ({"kv_cache": CACHE[0]}, r"kv_cache: shape is .*, must be \(pages, Hkv, page_size, 2·D\)"),
    ({"kv_cache": CACHE[..., :64]}, "kv_cache: its last dimension is 64, must be 128, twice q's"),
    ({"kv_cache": CACHE.to(E4M3)}, "k_scale: is missing, must be given with a float8_e4m3fn"),
    ({"kv_cache": CACHE.to(E4M3), "k_scale": SCALE}, "v_scale: is missing"),
    ({"k_scale": SCALE}, "k_scale: is given with a cache of q's dtype, which has no scale; leave"),
    ({"slot_mapping": SLOTS.int()}, "slot_mapping: dtype is int32, must be int64; convert"),
    ({"slot_mapping": SLOTS[None]}, r"slot_mapping: shape is \(1, 2\), must have 1 dimension"),
    ({"slot_mapping": SLOTS.repeat(2)[::2]}, r"slot_mapping: strides are \(2,\), must be \(1,\)"),
    ({"slot_mapping": SLOTS + 43}, "slot_mapping: holds 48, must be below 48, the slots of kv_"),
    ({"q_norm": WEIGHT}, "eps: is missing, must be given with q_norm; models use 1e-5"),
    ({"eps": 1e-5}, "eps: is given without q_norm or k_norm, must go with one; leave it out"),
    ({"k_norm": WEIGHT, "eps": -1.0}, "eps: is -1.0, must be 0 or more and finite"),
    ({"k_norm": WEIGHT.to(FP16), "eps": 0.0}, "k_norm: dtype is float16, must be bfloat16, float"),
    ({"q_norm": WEIGHT[:32], "eps": 0.0}, r"q_norm: shape is \(32,\), must be \(64,\); one factor"),
    ({"q_norm": WEIGHT.repeat(2)[::2], "eps": 0.0}, r"q_norm: strides are \(2,\), must be \(1,\)"),
    (
        {"q_norm": WEIGHT, "k_norm": WEIGHT.float(), "eps": 0.0},
        "k_norm: dtype is float32, must be b",
    ),
    ({"out": Q.float()}, "out: dtype is float32, must be bfloat16"),
    ({"out": Q[:1]}, r"out: shape is \(1, 4, 64\), must be \(2, 4, 64\)"),
    ({"out": WIDE[:, :4]}, r"out: strides are .* must be contiguous"),
    ({"q": WIDE[:, :4], "out": WIDE.view(4, 4, 64)[:2]}, "out: overlaps q, must be q itself, cont"),
    ({"q": WIDE.view(-1)[64:576].view(2, 4, 64), "out": WIDE.view(4, 4, 64)[:2]}, "out: overlaps"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_refused(changed: Given, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        rotary_store(**GIVEN | changed)


def test_results_beside_q_are_taken() -> None:
    """``out`` may be part of q's tensor, before or after q, but not between q's rows."""
    whole = torch.zeros(6, 4, 64, dtype=BF16)
    for first in (0, 4):
        rotary_store(**given_tensors() | {"q": whole[2:4]}, out=whole[first : first + 2])


def test_devices() -> None:
    def init(q: Tensor, *rest: Any) -> None:
        rotary_op._rotary_store._init_fn(torch.empty_like(q), q, *rest)

    with pytest.raises(InvalidArgument, match="v: is on meta, must be on cpu as q is; move it"):
        init(*positional(GIVEN | {"v": K.to("meta")}))
    meta = {n: x.to("meta") for n, x in GIVEN.items()}
    with pytest.raises(NoKernelError, match="rotary_store: no float kernel for meta"):
        init(*positional(meta))
    table = TABLE.float().to("meta"), meta["kv_cache"].to(E4M3), torch.ones((), dtype=FP32)
    scale = table[2].to("meta")
    fp8 = {"cos_sin_cache": table[0], "kv_cache": table[1], "k_scale": scale, "v_scale": scale}
    with pytest.raises(NoKernelError, match="rotary_store: no fp8_kv kernel for meta"):
        init(*positional(meta | fp8))
