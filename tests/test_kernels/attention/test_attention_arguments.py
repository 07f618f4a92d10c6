"""Arguments that ``attention`` and ``paged_attention`` refuse, and the messages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument, NoKernelError, attention, paged_attention
from nvfp4_kernels.attention import op as attention_op
from nvfp4_kernels.attention import paged_op
from tests.test_kernels.attention.attention_cases import BF16, FP8, FP16, Case

INT = torch.int32
ONE = torch.tensor(1.0)
CASE = Case((3, 1), (20, 40), head_dim=32, sinks=True)
PROBLEM = CASE.problem()
PAGED, RAGGED = PROBLEM.paged(), PROBLEM.ragged()
DENSE = Case((3, 3), (20, 20), head_dim=32, sinks=True).problem().dense()
Q, CACHE, TABLE = PAGED["q"], PAGED["kv_cache"], PAGED["block_table"]
FP8_CACHE = {"kv_cache": CACHE.to(FP8), "k_scale": ONE, "v_scale": ONE}


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT)


def refused(op: Callable[..., Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        op(**arguments)


def named(given: object) -> str | None:
    return " ".join(given) if isinstance(given, dict) else ""


def spread(x: Tensor) -> Tensor:
    """Return a copy whose last stride is not 1."""
    return torch.stack([x, x], -1)[..., 0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scale": 0.0}, "scale: is 0.0, must be positive and finite; D .* is usual"),
        ({"scale": float("nan")}, "scale: is nan, must be positive and finite"),
        ({"q": None}, "q: is NoneType, must be a tensor of bfloat16, float16; make one"),
        ({"soft_cap": 0.0}, "soft_cap: is 0.0, must be positive and finite; pass None"),
        ({"soft_cap": float("inf")}, "soft_cap: is inf, must be positive and finite"),
        ({"window": 0}, "window: is 0, must be 1 or more keys, the query's own included"),
        (
            {"window": 5, "causal": False},
            "window: is given without causal, must go with it.*causal=True",
        ),
        ({"sinks": torch.zeros(4, dtype=BF16)}, "sinks: dtype is bfloat16, must be float32"),
        ({"sinks": torch.zeros(2)}, r"sinks: shape is \(2,\), must be \(4,\); one logit per head"),
        ({"sinks": torch.zeros(8)[::2]}, "sinks: stride is 2, must be 1; call contiguous"),
    ],
    ids=named,
)
@pytest.mark.parametrize(
    ("op", "arguments"),
    [(paged_attention, PAGED), (attention, RAGGED), (attention, DENSE)],
    ids=["paged", "ragged", "dense"],
)
def test_refused_by_all(
    op: Callable[..., Any], arguments: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    refused(op, arguments | changed, message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": Q.float()}, "q: dtype is float32, must be bfloat16, float16; convert it"),
        ({"q": Q[0]}, r"q: shape is \(4, 32\), must be \(T, Hq, D\); reshape it"),
        ({"q": Q[..., :24]}, "q: D is 24, must be a multiple of 16 from 16 to 256; pad"),
        ({"q": Q[..., :0]}, "q: D is 0, must be a multiple of 16 from 16 to 256"),
        ({"q": torch.zeros(4, 4, 272, dtype=BF16)}, "q: D is 272, must be a multiple of 16 from"),
        ({"q": spread(Q)}, "q: strides are .*, the last must be 1; call contiguous"),
        ({"kv_cache": CACHE.half()}, "kv_cache: dtype is float16, must be bfloat16, float8_e4m3fn"),
        ({"kv_cache": CACHE[0]}, r"kv_cache: shape is .*, must be \(pages, Hkv, page_size, 2·D\)"),
        ({"kv_cache": CACHE[..., :32]}, "kv_cache: its last dimension is 32, must be 64, twice q"),
        ({"kv_cache": CACHE[:, :, :0]}, "kv_cache: page_size is 0, must be positive"),
        ({"kv_cache": spread(CACHE)}, "kv_cache: strides are .*, the last must be 1"),
        ({"kv_cache": CACHE[:, [0, 1, 1]]}, "kv_cache: has 3 heads, q's 4 must be a multiple"),
        ({"kv_cache": CACHE[:, :0]}, "kv_cache: has 0 heads, q's 4 must be a multiple"),
        ({"k_scale": ONE}, "k_scale: is given with a cache of q's dtype.*leave it out"),
        ({"v_scale": ONE}, "v_scale: is given with a cache of q's dtype.*leave it out"),
        (FP8_CACHE | {"k_scale": None}, "k_scale: is missing, must be given with a float8_e4m3fn"),
        (FP8_CACHE | {"v_scale": None}, "v_scale: is missing, must be given with a float8_e4m3fn"),
        (FP8_CACHE | {"k_scale": ONE.double()}, "k_scale: dtype is float64, must be float32"),
        (FP8_CACHE | {"v_scale": torch.ones(1)}, r"v_scale: shape is \(1,\), must be \(\)"),
        ({"block_table": TABLE.long()}, "block_table: dtype is int64, must be int32"),
        ({"block_table": TABLE[0]}, r"block_table: shape is .*, must have 2 dimension"),
        ({"block_table": TABLE[:1]}, r"block_table: shape is \(1, 5\), must be \(2, 5\); one row"),
        ({"block_table": spread(TABLE)}, "block_table: strides are .*, the last must be 1"),
        ({"seq_lens": torch.tensor([20, 40])}, "seq_lens: dtype is int64, must be int32"),
        ({"seq_lens": ints(20, 40, 1)}, r"seq_lens: shape is \(3,\), must be \(2,\); one length"),
        ({"seq_lens": spread(ints(20, 40))}, r"seq_lens: strides are \(2,\), the last must be 1"),
        ({"seq_lens": ints(20, 40).unsqueeze(0)}, "seq_lens: shape is .*, must have 1 dimension"),
        ({"query_start": torch.tensor([0, 3, 4])}, "query_start: dtype is int64, must be int32"),
        ({"query_start": spread(ints(0, 3, 4))}, "query_start: strides are .*, the last must be 1"),
        ({"query_start": ints()}, "query_start: is empty, must hold B \\+ 1 starts"),
        ({"query_start": ints(0, 3, 4).unsqueeze(0)}, "query_start: shape is .* 1 dimension"),
        ({"max_query_len": -1}, "max_query_len: is -1, must be 0 or more"),
        ({"max_seq_len": -1}, "max_seq_len: is -1, must be 0 or more"),
        # Checks of tensor values, on the CPU.
        ({"query_start": ints(1, 3, 4)}, "query_start: begins with 1, must begin with 0"),
        ({"query_start": ints(0, 3, 2)}, "query_start: falls at 1, must not"),
        ({"query_start": ints(0, 3, 5)}, "query_start: ends with 5, must be at most 4, the rows"),
        ({"max_query_len": 2}, "max_query_len: is 2, must be at least 3, the longest in query_st"),
        ({"seq_lens": ints(20, -1)}, "seq_lens: is -1 for sequence 1, must be from 0 to 80"),
        ({"seq_lens": ints(81, 4)}, "seq_lens: is 81 for sequence 0, must be from 0 to 80.*widen"),
        ({"max_seq_len": 39}, "max_seq_len: is 39, must be at least 40, the longest in seq_lens"),
        ({"block_table": TABLE.clamp_max(-1)}, "block_table: holds page -1, must be from 0 to 7"),
        ({"kv_cache": CACHE[:0]}, "block_table: holds page .*, must be from 0 to -1"),
        ({"seq_lens": ints(20, 60), "max_seq_len": 60}, "block_table: holds page 1073741824"),
    ],
    ids=named,
)
def test_refused_by_paged(changed: dict[str, Any], message: str) -> None:
    refused(paged_attention, PAGED | changed, message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": DENSE["q"].float()}, "q: dtype is float32, must be bfloat16, float16; convert it"),
        ({"q": DENSE["q"][0]}, r"q: shape is \(3, 4, 32\), must be \(B, Tq, Hq, D\); reshape it"),
        ({"q": DENSE["q"][:1]}, "k: B is 2, must be 1 as q's"),
        ({"k": DENSE["k"].half()}, "k: dtype is float16, must be bfloat16"),
        ({"k": DENSE["k"][0]}, r"k: shape is \(20, 2, 32\), must be \(B, Tk, Hkv, D\)"),
        ({"k": DENSE["k"][..., :16]}, "k: D is 16, must be 32 as q's; pad it"),
        ({"k": spread(DENSE["k"])}, "k: strides are .*, the last must be 1; call contiguous"),
        ({"v": DENSE["v"].half()}, "v: dtype is float16, must be bfloat16"),
        ({"v": DENSE["v"][..., :16]}, "v: D is 16, must be 32 as q's; pad it"),
        ({"v": DENSE["v"][:, :5]}, r"v: shape is \(2, 5, 2, 32\), must be .*; one value per key"),
        ({"v": spread(DENSE["v"])}, "v: strides are .*, the last must be 1; call contiguous"),
        ({"q": DENSE["q"][:, :, :3]}, "k: has 2 heads, q's 3 must be a multiple of them"),
    ],
    ids=named,
)
def test_refused_by_dense(changed: dict[str, Any], message: str) -> None:
    refused(attention, DENSE | changed, message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": DENSE["q"]}, r"q: shape is .*, must be \(total_q, Hq, D\); reshape it"),
        ({"k": DENSE["k"]}, r"k: shape is .*, must be \(total_k, Hkv, D\); reshape it"),
        ({"query_start": None}, "query_start: is missing, must be given as key_start is"),
        ({"key_start": None}, "key_start: is missing, must be given as query_start is"),
        ({"max_query_len": None}, "max_query_len: is missing, must be given as query_start is"),
        ({"max_key_len": None}, "max_key_len: is missing, must be given as query_start is"),
        ({"query_start": torch.tensor([0, 3, 4])}, "query_start: dtype is int64, must be int32"),
        ({"key_start": torch.tensor([0, 20, 60])}, "key_start: dtype is int64, must be int32"),
        ({"key_start": ints(0, 20)}, r"key_start: shape is \(2,\), must be \(3,\); one start"),
        ({"key_start": spread(ints(0, 20, 60))}, "key_start: strides are .*, the last must be 1"),
        ({"max_key_len": -1}, "max_key_len: is -1, must be 0 or more"),
        ({"query_start": ints(0, 3, 5)}, "query_start: ends with 5, must be at most 4, the rows"),
        ({"key_start": ints(0, 20, 61)}, "key_start: ends with 61, must be at most 60, the rows"),
        ({"key_start": ints(0, 20, 10)}, "key_start: falls at 1, must not"),
        ({"max_key_len": 39}, "max_key_len: is 39, must be at least 40, the longest in key_start"),
    ],
    ids=named,
)
def test_refused_by_ragged(changed: dict[str, Any], message: str) -> None:
    refused(attention, RAGGED | changed, message)


def elsewhere(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """Move one tensor to another device; custom ops take that only through their function."""
    return arguments | {name: arguments[name].to("meta")}


@pytest.mark.parametrize("name", ["kv_cache", "block_table", "seq_lens", "query_start", "sinks"])
def test_paged_on_two_devices(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}: is on meta, must be on cpu as q is"):
        call(paged_op._paged_attention, elsewhere(PAGED, name))


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_on_two_devices(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}: is on meta, must be on cpu as q is"):
        call(paged_op._paged_attention, elsewhere(PAGED | FP8_CACHE, name))


@pytest.mark.parametrize("name", ["k", "v", "query_start", "key_start", "sinks"])
def test_ragged_on_two_devices(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}: is on meta, must be on cpu as q is"):
        call(attention_op._attention, elsewhere(RAGGED, name))


def test_dense_on_two_devices() -> None:
    with pytest.raises(InvalidArgument, match="k: is on meta, must be on cpu as q is"):
        call(attention_op._attention, elsewhere(DENSE, "k"))


def test_no_kernel() -> None:
    meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in PAGED.items()}
    with pytest.raises(NoKernelError, match="paged_attention: no float kernel for meta"):
        call(paged_op._paged_attention, meta)
    fp8 = {name: x.to("meta") for name, x in FP8_CACHE.items()}
    with pytest.raises(NoKernelError, match="paged_attention: no fp8_kv kernel for meta"):
        call(paged_op._paged_attention, meta | fp8)
    dense = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in DENSE.items()}
    with pytest.raises(NoKernelError, match="attention: no float kernel for meta"):
        call(attention_op._attention, dense)


def call(op: Any, arguments: dict[str, Any]) -> None:
    op._init_fn(*(arguments.get(argument.name) for argument in op._opoverload._schema.arguments))


def test_fp16() -> None:
    """The queries must have the keys' dtype."""
    refused(paged_attention, PAGED | {"q": Q.to(FP16)}, "kv_cache: dtype is bfloat16, must be fl")


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (Q.float(), "out: dtype is float32, must be bfloat16"),
        (Q[1:], r"out: shape is \(3, .*must be \(4, .*; one row per row of q"),
        (Q.to("meta"), "out: is on meta, must be on cpu as q is"),
        (spread(Q), "out: strides are .*, must be contiguous; leave it out and copy the result"),
    ],
    ids=["dtype", "shape", "device", "strides"],
)
def test_out(out: Tensor, message: str) -> None:
    refused(paged_attention, PAGED | {"out": out}, message)
