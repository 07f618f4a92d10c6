"""Arguments that the indexer's ops refuse, and their messages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import (
    InvalidArgument,
    NoKernelError,
    indexer_gather_k,
    indexer_logits,
    indexer_quantize_q,
    indexer_score_topk,
    indexer_store_k,
    indexer_topk,
)
from nvfp4_kernels.indexer import cache_op, score_op, topk_op
from tests.test_kernels.indexer.indexer_cases import CASES, run_logits, run_score_topk
from tests.test_kernels.indexer.indexer_oracle import FORMATS

BF16, INT = torch.bfloat16, torch.int32
PROBLEM = CASES["several queries"].problem("nvfp4")
DENSE, PAGED = PROBLEM.contiguous(), PROBLEM.paged()
FP8_DENSE = CASES["several queries"].problem("fp8").contiguous()
BF16_DENSE = CASES["several queries"].problem("bf16").contiguous()
Q, K, CACHE, TABLE = DENSE["q"], DENSE["k"], PAGED["cache"], PAGED["block_table"]
SCALE = torch.tensor(0.5)
QUANTIZE = {"q": torch.zeros(3, 4, 64, dtype=BF16), "fmt": "nvfp4", "global_scale": SCALE}
STORE = {
    "k": torch.zeros(3, 64, dtype=BF16),
    "cache": torch.zeros(5, 16 * 36, dtype=torch.uint8),
    "slot_mapping": torch.tensor([7, -1, 79]),
    "fmt": "nvfp4",
    "block_size": 16,
    "global_scale": SCALE,
}


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT)


GATHER = {
    "cache": STORE["cache"],
    "block_table": ints(0, 1, 4, 3).view(2, 2),
    "key_start": ints(0, 20, 52),
    "total_keys": 52,
    "head_dim": 64,
    "fmt": "nvfp4",
    "block_size": 16,
}
TOPK = {"logits": torch.zeros(3, 9), "lens": ints(9, 0, 4), "top_k": 2, "starts": ints(0, 9, 5)}


def spread(x: Tensor) -> Tensor:
    """Tensor of the same values whose last stride is not 1."""
    return torch.stack([x, x], -1)[..., 0]


def refused(op: Callable[..., Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        op(**arguments)


def named(given: object) -> str | None:
    return " ".join(given) if isinstance(given, dict) else ""


GLOBAL_SCALES = [
    ({"global_scale": None}, "global_scale: is missing, must be given with nvfp4; pass a float32"),
    ({"fmt": "fp8"}, "global_scale: is given with fp8, which has none; leave it out"),
    ({"global_scale": SCALE.double()}, "global_scale: dtype is float64, must be float32"),
    ({"global_scale": SCALE.view(1)}, r"global_scale: shape is \(1,\), must be \(\); one scale"),
    ({"global_scale": -SCALE}, "global_scale: is -0.5, must be positive and finite; max"),
    ({"global_scale": 0 * SCALE}, "global_scale: is 0.0, must be positive and finite"),
    ({"global_scale": SCALE / 0}, "global_scale: is inf, must be positive and finite"),
    ({"global_scale": SCALE * torch.nan}, "global_scale: is nan, must be positive and finite"),
]


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (indexer_quantize_q, QUANTIZE),
        (indexer_store_k, STORE),
        (indexer_gather_k, GATHER),
        (run_logits, DENSE),
        (run_logits, PAGED),
        (run_score_topk, DENSE | {"top_k": 2}),
        (run_score_topk, PAGED | {"top_k": 2}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_unknown_format(op: Callable[..., Any], arguments: dict[str, Any]) -> None:
    op(**arguments)
    message = "fmt: is 'int4', must be nvfp4, mxfp4, fp8, bf16; choose one"
    refused(op, arguments | {"fmt": "int4"}, message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *GLOBAL_SCALES,
        ({"q": QUANTIZE["q"].half()}, "q: dtype is float16, must be bfloat16; convert it"),
        ({"q": QUANTIZE["q"][0]}, r"q: shape is \(4, 64\), must be \(T, H, D\); reshape it"),
        ({"q": QUANTIZE["q"][..., :48]}, "q: D is 48, must be a multiple of 32 from 32 to 256"),
        ({"q": QUANTIZE["q"][..., :0]}, "q: D is 0, must be a multiple of 32 from 32 to 256"),
        ({"q": torch.zeros(1, 1, 288, dtype=BF16)}, "q: D is 288, must be a multiple of 32"),
        ({"q": spread(QUANTIZE["q"])}, "q: strides are .*, the last must be 1; call contiguous"),
    ],
    ids=named,
)
def test_refused_by_quantize(changed: dict[str, Any], message: str) -> None:
    refused(indexer_quantize_q, QUANTIZE | changed, message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *[c for c in GLOBAL_SCALES if "fmt" not in c[0]],
        ({"k": STORE["k"].float()}, "k: dtype is float32, must be bfloat16; convert it"),
        ({"k": STORE["k"][0]}, r"k: shape is \(64,\), must be \(T, D\); reshape it"),
        ({"k": STORE["k"][:, :40]}, "k: D is 40, must be a multiple of 32 from 32 to 256"),
        ({"k": spread(STORE["k"])}, "k: strides are .*, the last must be 1; call contiguous"),
        ({"cache": STORE["cache"].float()}, "cache: dtype is float32, must be uint8"),
        ({"cache": STORE["cache"][0]}, r"cache: shape is .*, must be \(pages, page_bytes\)"),
        ({"cache": STORE["cache"][:, 1:]}, "cache: a page has 575 bytes, must have 576, for 16 nv"),
        ({"fmt": "mxfp4", "global_scale": None}, "cache: a page has 576 bytes, must have 544"),
        ({"block_size": 8}, "cache: a page has 576 bytes, must have 288, for 8 nvfp4 keys of 64"),
        ({"block_size": 0}, "block_size: is 0, must be 1 or more keys of a page"),
        ({"cache": spread(STORE["cache"])}, r"cache: strides are \(1152, 2\), the last must be 1"),
        (
            {"cache": STORE["cache"].view(-1).as_strided((5, 576), (512, 1))},
            r"cache: strides are \(512, 1\), .* first at least 576, so that no two pages overlap",
        ),
        ({"slot_mapping": ints(7, -1, 79)}, "slot_mapping: dtype is int32, must be int64"),
        ({"slot_mapping": torch.tensor([7])}, r"slot_mapping: shape is \(1,\), must be \(3,\)"),
        (
            {"slot_mapping": spread(STORE["slot_mapping"])},
            r"slot_mapping: strides are \(2,\) for shape \(3,\), must be contiguous",
        ),
        (
            {"slot_mapping": torch.tensor([7, -2, 5])},
            "slot_mapping: holds -2, must be from 0 to 79",
        ),
        (
            {"slot_mapping": torch.tensor([80, 1, 5])},
            "slot_mapping: holds 80, must be from 0 to 79",
        ),
        (
            {"slot_mapping": torch.tensor([5, 1, 5])},
            "slot_mapping: holds 5 twice, must hold a slot",
        ),
    ],
    ids=named,
)
def test_refused_by_store(changed: dict[str, Any], message: str) -> None:
    before = STORE["cache"].clone()
    refused(indexer_store_k, STORE | changed, message)
    assert torch.equal(STORE["cache"], before)


TABLES = [
    ({"block_table": TABLE.long()}, "block_table: dtype is int64, must be int32"),
    ({"block_table": TABLE[0]}, r"block_table: shape is .*, must be \(B, P\); reshape it"),
    ({"block_table": TABLE[:1]}, r"block_table: shape is \(1, .*\), must be .*; one row per seq"),
    ({"block_table": spread(TABLE)}, "block_table: strides are .*, the last must be 1"),
]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cache": STORE["cache"].int()}, "cache: dtype is int32, must be uint8"),
        ({"cache": STORE["cache"][:, :99]}, "cache: a page has 99 bytes, must have 576"),
        ({"head_dim": 65}, "head_dim: D is 65, must be a multiple of 32"),
        ({"head_dim": 32}, "cache: a page has 576 bytes, must have 288, for 16 nvfp4 keys of 32"),
        ({"block_size": -1}, "block_size: is -1, must be 1 or more"),
        ({"total_keys": -1}, "total_keys: is -1, must be 0 or more; pass the sum"),
        ({"total_keys": 51}, "total_keys: is 51, must be at least 52, the end of key_start"),
        ({"key_start": torch.tensor([0, 20, 52])}, "key_start: dtype is int64, must be int32"),
        ({"key_start": ints(0, 20, 52).view(1, 3)}, r"key_start: shape .*, must be \(B \+ 1\)"),
        ({"key_start": spread(ints(0, 20, 52))}, "key_start: strides are .*, must be contiguous"),
        ({"key_start": ints()}, r"key_start: is empty, must hold B \+ 1 starts"),
        ({"key_start": ints(1, 20, 52)}, "key_start: begins with 1, must begin with 0"),
        ({"key_start": ints(0, 20, 19)}, "key_start: falls at 1, must not; cumsum"),
        ({"key_start": ints(0, 33, 52)}, "block_table: has room for 32 keys .* must .* 33; widen"),
        ({"block_table": GATHER["block_table"].long()}, "block_table: dtype is int64, must be int"),
        ({"block_table": GATHER["block_table"][0]}, r"block_table: shape .* must be \(B, P\)"),
        ({"block_table": GATHER["block_table"][:1]}, "block_table: shape .*; one row per sequence"),
        ({"block_table": spread(GATHER["block_table"])}, "block_table: strides are .* must be 1"),
        ({"block_table": ints(0, 5, 4, 3).view(2, 2)}, "block_table: holds page 5, .* 0 to 4"),
        ({"block_table": ints(0, -1, 4, 3).view(2, 2)}, "block_table: holds page -1, .* 0 to 4"),
    ],
    ids=named,
)
def test_refused_by_gather(changed: dict[str, Any], message: str) -> None:
    refused(indexer_gather_k, GATHER | changed, message)


# All ops that score.
OPERANDS = [
    (
        {"q_scales": None},
        "q_scales: are missing, must be given with nvfp4; pass the scales that q was",
    ),
    ({"weights": DENSE["weights"].double()}, "weights: dtype is float64, must be float32"),
    ({"weights": DENSE["weights"][:, :4]}, r"weights: shape is \(9, 4\), must be \(9, 8\); one"),
    ({"weights": spread(DENSE["weights"])}, "weights: strides are .*, must be contiguous; call"),
]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *OPERANDS,
        ({"q": Q.int()}, "q: dtype is int32, must be uint8; convert it"),
        ({"q": Q[0]}, r"q: shape is \(8, 32\), must be \(T, H, D/2\); reshape it"),
        ({"q": Q[..., :24]}, "q: D is 48, must be a multiple of 32"),
        ({"q": spread(Q)}, "q: strides are .*, must be contiguous; call contiguous"),
        ({"q_scales": DENSE["q_scales"].float()}, "q_scales: dtype is float32, must be float8_e4"),
        ({"q_scales": DENSE["q_scales"][:2]}, "q_scales: shape is .*, must be .*; as nvfp4 has"),
        ({"q_scales": spread(DENSE["q_scales"])}, "q_scales: strides are .*, must be contiguous"),
        ({"k": K.float()}, "k: dtype is float32, must be uint8"),
        ({"k": K[0]}, r"k: shape is \(32,\), must be \(Tk, D/2\)"),
        (
            {"k": K[:, :16].contiguous(), "k_scales": DENSE["k_scales"][:, :2].contiguous()},
            "k: D is 32, must be 64 as q's; pad it",
        ),
        ({"k": spread(K)}, "k: strides are .*, must be contiguous"),
        (
            {"k_scales": None},
            "k_scales: are missing, must be given with nvfp4; pass the scales that k",
        ),
        ({"k_scales": DENSE["k_scales"][:5]}, r"k_scales: shape is \(5, 4\), must be \(42, 4\)"),
        ({"k_scales": DENSE["k_scales"].half()}, "k_scales: dtype is float16, must be float8"),
        ({"k_scales": spread(DENSE["k_scales"])}, "k_scales: strides are .*, must be contiguous"),
        ({"ks": DENSE["ks"].long()}, "ks: dtype is int64, must be int32"),
        ({"ks": DENSE["ks"][:3]}, r"ks: shape is \(3,\), must be \(9,\); the first key of each"),
        ({"ks": spread(DENSE["ks"])}, "ks: strides are .*, must be contiguous"),
        ({"ke": DENSE["ke"].long()}, "ke: dtype is int64, must be int32"),
        ({"ke": DENSE["ke"][:3]}, r"ke: shape is \(3,\), must be \(9,\); the key after the last"),
        ({"ke": spread(DENSE["ke"])}, "ke: strides are .*, must be contiguous"),
        ({"ks": DENSE["ks"] - 1}, "ks: is -1 for query 0, must be from 0 to 42, the keys there"),
        ({"ks": DENSE["ks"] + 1}, "ke: is 41 for query 6, must be from 42, its ks, to 42"),
        ({"ke": DENSE["ke"] + 2}, "ke: is 43 for query 5, must be from 7, its ks, to 42"),
        ({"ks": DENSE["ks"] + 40}, "ks: is 47 for query 3, must be from 0 to 42, the keys there"),
    ],
    ids=named,
)
@pytest.mark.parametrize("op", [run_logits, run_score_topk])
def test_refused_with_keys(op: Callable[..., Any], changed: dict[str, Any], message: str) -> None:
    more = {"top_k": 2} if op is run_score_topk else {}
    refused(op, DENSE | more | changed, message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (FP8_DENSE | {"k_scales": None}, "k_scales: are missing, must be given with fp8"),
        (
            FP8_DENSE | {"q_scales": FP8_DENSE["q_scales"].unsqueeze(-1)},
            r"q_scales: shape is \(9, 8, 1\), must be \(9, 8\); as fp8",
        ),
        (BF16_DENSE | {"q_scales": SCALE}, "q_scales: are given with bf16, which has none; leave"),
        (BF16_DENSE | {"k_scales": SCALE}, "k_scales: are given with bf16, which has none; leave"),
        (DENSE | {"fmt": "mxfp4"}, "q_scales: dtype is float8_e4m3fn, must be float8_e8m0fnu"),
        (DENSE | {"fmt": "bf16"}, "q: dtype is uint8, must be bfloat16"),
    ],
    ids=["fp8 keys", "fp8 queries", "bf16 queries", "bf16 keys", "mxfp4", "bf16"],
)
def test_refused_of_a_format(given: dict[str, Any], message: str) -> None:
    refused(run_logits, given, message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *OPERANDS,
        *TABLES,
        ({"q": Q}, r"q: shape is .*, must be \(B, next_n, H, D/2\); reshape it"),
        ({"cache": CACHE[:, 1:]}, "cache: a page has 575 bytes, must have 576, for 16 nvfp4 keys"),
        ({"cache": CACHE.int()}, "cache: dtype is int32, must be uint8"),
        ({"block_size": 0}, "block_size: is 0, must be 1 or more keys"),
        ({"block_size": 32}, "cache: a page has 576 bytes, must have 1152, for 32"),
        ({"context_lens": PAGED["context_lens"].long()}, "context_lens: dtype is int64, must be"),
        (
            {"context_lens": PAGED["context_lens"].flatten()},
            r"context_lens: shape is \(9,\), must be \(3, 3\); one length per query",
        ),
        ({"context_lens": spread(PAGED["context_lens"])}, "context_lens: strides are .* contig"),
        ({"context_lens": PAGED["context_lens"] - 1}, "context_lens: is -1 for row 6, must be fr"),
        ({"max_context_len": 33}, "context_lens: is 34 for row 5, must be from 0 to 33, max_cont"),
        ({"max_context_len": -1}, "max_context_len: is -1, must be 0 or more; pass the longest"),
        ({"block_table": TABLE[:, :2]}, "block_table: has room for 32 keys per sequence, .* 34"),
        ({"block_table": TABLE + 99}, "block_table: holds page .*, must be from 0 to 6, the pages"),
        ({"block_table": TABLE - 99}, "block_table: holds page -.*, must be from 0 to 6"),
    ],
    ids=named,
)
@pytest.mark.parametrize("op", [run_logits, run_score_topk])
def test_refused_with_pages(op: Callable[..., Any], changed: dict[str, Any], message: str) -> None:
    more = {"top_k": 2} if op is run_score_topk else {}
    refused(op, PAGED | more | changed, message)


@pytest.mark.parametrize("keys", [K, None, (K, DENSE["k_scales"], DENSE["ks"], DENSE["ke"])])
def test_refused_keys(keys: Any) -> None:
    message = rf"keys: is {type(keys).__name__}, must be IndexerKeys\(.*\) or IndexerPagedKeys\("
    for op, more in ((indexer_logits, {}), (indexer_score_topk, {"top_k": 2})):
        given = {name: DENSE[name] for name in ("q", "q_scales", "weights", "fmt")}
        refused(op, given | more | {"keys": keys}, message)


@pytest.mark.parametrize("top_k", [0, -1, 4097])
@pytest.mark.parametrize(
    ("op", "arguments"),
    [(indexer_topk, TOPK), (run_score_topk, DENSE), (run_score_topk, PAGED)],
    ids=["logits", "keys", "pages"],
)
def test_refused_top_k(op: Callable[..., Any], arguments: dict[str, Any], top_k: int) -> None:
    message = f"top_k: is {top_k}, must be from 1 to 4096; choose in several calls"
    refused(op, arguments | {"top_k": top_k}, message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": TOPK["logits"].double()}, "logits: dtype is float64, must be float32"),
        ({"logits": TOPK["logits"][0]}, r"logits: shape is \(9,\), must be \(rows, columns\)"),
        ({"logits": spread(TOPK["logits"])}, "logits: strides are .*, the last must be 1; call"),
        ({"lens": TOPK["lens"].long()}, "lens: dtype is int64, must be int32"),
        ({"lens": ints(9, 0)}, r"lens: shape is \(2,\), must be \(3,\); one length per row"),
        ({"lens": spread(TOPK["lens"])}, "lens: strides are .*, must be contiguous"),
        ({"starts": TOPK["starts"].long()}, "starts: dtype is int64, must be int32"),
        ({"starts": ints(9, 0)}, r"starts: shape is \(2,\), must be \(3,\); one start per row"),
        ({"starts": spread(TOPK["starts"])}, "starts: strides are .*, must be contiguous"),
        ({"lens": ints(9, 0, -1)}, "lens: is -1 for row 2, must be from 0 to 4, the columns of lo"),
        ({"lens": ints(9, 0, 5)}, "lens: is 5 for row 2, must be from 0 to 4, .* from 5 on"),
        ({"starts": ints(0, 10, 5)}, "starts: is 10 for row 1, must be from 0 to 9, the columns"),
        ({"starts": ints(0, -1, 5)}, "starts: is -1 for row 1, must be from 0 to 9"),
        ({"starts": None, "lens": ints(9, 10, 5)}, "lens: is 10 for row 1, must be from 0 to 9"),
        ({"starts": None, "lens": ints(9, -1, 5)}, "lens: is -1 for row 1, must be from 0 to 9"),
    ],
    ids=named,
)
def test_refused_by_topk(changed: dict[str, Any], message: str) -> None:
    indexer_topk(**TOPK)
    refused(indexer_topk, TOPK | changed, message)


def call(op: Any, arguments: dict[str, Any]) -> None:
    """Call past the dispatcher, which refuses tensors of two devices."""
    op._init_fn(*(arguments.get(argument.name) for argument in op._opoverload._schema.arguments))


ALL_OPS = {
    "quantize": (cache_op._quantize_q, QUANTIZE),
    "store": (cache_op._store_k, STORE),
    "gather": (cache_op._gather_k, GATHER),
    "logits": (score_op._logits, DENSE),
    "logits paged": (score_op._logits_paged, PAGED),
    "score topk": (topk_op._score_topk, DENSE | {"top_k": 2}),
    "score topk paged": (topk_op._score_topk_paged, PAGED | {"top_k": 2}),
    "topk": (topk_op._topk, TOPK),
}


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (name, argument)
        for name, (_, arguments) in ALL_OPS.items()
        for argument in [n for n, x in arguments.items() if isinstance(x, Tensor)][1:]
    ],
)
def test_two_devices(op: str, name: str) -> None:
    function, arguments = ALL_OPS[op]
    elsewhere = arguments | {name: arguments[name].to("meta")}
    with pytest.raises(InvalidArgument, match=f"{name}: is on meta, must be on cpu as"):
        call(function, elsewhere)


@pytest.mark.parametrize("name", ALL_OPS)
def test_no_kernel(name: str) -> None:
    function, arguments = ALL_OPS[name]
    meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in arguments.items()}
    mode = "float" if name == "topk" else "nvfp4"
    with pytest.raises(NoKernelError, match=f"indexer_.*: no {mode} kernel for meta"):
        call(function, meta)


def test_formats_are_those_tested() -> None:
    for fmt in FORMATS:
        indexer_quantize_q(QUANTIZE["q"], fmt, SCALE if fmt == "nvfp4" else None)
