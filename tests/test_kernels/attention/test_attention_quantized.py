"""``paged_attention`` with an NVFP4 result: bit-identical to the 16-bit result quantised."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument, PerToken, Static, paged_attention, quantize
from nvfp4_kernels.attention.sm100.tile import AttentionTile
from nvfp4_kernels.formats.nvfp4 import from_blocked, global_scale_of
from nvfp4_kernels.formats.nvfp4_rows import new_nvfp4_rows
from tests.test_kernels.attention.attention_cases import Case
from tests.test_kernels.attention.attention_sm100 import Chosen
from tests.test_kernels.compilation import check_op

FP16 = torch.float16
ONE = torch.tensor(1.0)
SM100 = pytest.mark.arch("sm_100")
ONE_SCHEDULE = pytest.mark.schedules("random 1")

PREFILL = Case((70, 3, 1), (139, 3, 1), 4, 2, head_dim=64)
DECODE = Case((1, 1, 2), (300, 129, 2), 4, 1, head_dim=128)
TILES = {
    "two query tiles": (Chosen(AttentionTile(128, 2)), {"head_dim": 128}),
    "one query tile": (Chosen(AttentionTile(192)), {"head_dim": 192, "sinks": True}),
    "fp8": (Chosen(AttentionTile(64, 2, fp8=True)), {"fp8": True, "dtype": FP16}),
    "splits": (Chosen(AttentionTile(64), 3), {"sinks": True}),
    "splits, fp16": (Chosen(AttentionTile(128), 2), {"head_dim": 128, "dtype": FP16}),
    "warp split": (Chosen(AttentionTile(64, warp_split_kv=True)), {"sinks": True}),
    "warp split, splits": (
        Chosen(AttentionTile(128, warp_split_kv=True), 2),
        {"head_dim": 128, "window": 77},
    ),
    "warp split, fp8": (Chosen(AttentionTile(64, fp8=True, warp_split_kv=True)), {"fp8": True}),
    "two query tiles, D = 32": (Chosen(AttentionTile(32, 2)), {"head_dim": 32}),
    "D = 96": (Chosen(AttentionTile(96, fp8=True)), {"head_dim": 96, "fp8": True}),
    "splits, D = 32": (Chosen(AttentionTile(32), 2), {"head_dim": 32}),
    "warp split, fp8, D = 32": (
        Chosen(AttentionTile(32, fp8=True, warp_split_kv=True, ctas_per_sm=2)),
        {"head_dim": 32, "fp8": True},
    ),
    "warp split, D = 160": (Chosen(AttentionTile(160, warp_split_kv=True)), {"head_dim": 160}),
    "warp split, D = 256": (Chosen(AttentionTile(256, warp_split_kv=True)), {"head_dim": 256}),
}


def on(device: torch.device, arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}


def check(given: dict[str, Any], first_row: int = 0) -> None:
    """Check against ``paged_attention`` followed by ``quantize``.

    The result's scales go to rows from ``first_row`` on of a taller operand, whose other scales
    must stay unchanged.
    """
    out, lse = paged_attention(**given)
    rows = len(out)
    scale = (global_scale_of(out.cpu()) / 2).to(out.device)  # some blocks saturate
    data, scales = quantize(out.flatten(1), Static(scale))
    q = given["q"]
    _, whole = new_nvfp4_rows(q.new_empty((first_row + rows + 140, *q.shape[1:])))
    whole.view(torch.uint8).fill_(0x7F)
    memory = new_nvfp4_rows(q)[0], whole
    got, got_scales, got_lse = paged_attention(
        **given, output=Static(scale), out=memory, first_row=first_row
    )
    assert got.cpu().flatten(1).equal(data.cpu())
    assert got_lse.equal(lse)
    blocks = 2 * data.shape[-1] // 16
    linear = from_blocked(got_scales.cpu(), first_row + rows + 140, blocks).view(torch.uint8)
    expected = torch.full_like(linear, 0x7F)
    own = slice(first_row, first_row + rows)
    expected[own] = from_blocked(scales.cpu(), rows, blocks).view(torch.uint8)
    assert linear.equal(expected)


@pytest.mark.parametrize("case", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("first_row", [0, 5, 250])
def test_reference(case: Case, first_row: int) -> None:
    check(case.problem().paged(), first_row)


def test_new_memory() -> None:
    given = DECODE.problem().paged()
    scale = torch.tensor(0.01)
    data, scales, _ = paged_attention(**given, output=Static(scale))
    expected, expected_scales = quantize(paged_attention(**given)[0].flatten(1), Static(scale))
    assert data.flatten(1).equal(expected)
    assert scales.shape == expected_scales.shape
    live = [
        from_blocked(each, len(data), 32).view(torch.uint8) for each in (scales, expected_scales)
    ]
    assert live[0].equal(live[1])


@SM100
@ONE_SCHEDULE
@pytest.mark.parametrize("name", TILES)
def test_tiles(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, changed = TILES[name]
    chosen.use(monkeypatch)
    queries = (9, 1, 2) if chosen.tile.warp_split_kv else (150, 3, 1)
    case = Case(
        **{
            "queries": queries,
            "keys": (389, 3, 40),
            "query_heads": 4,
            "heads": 2,
            "head_dim": 64,
            **changed,
        }
    )
    check(on(op_device, case.problem().paged()), first_row=120)


# Split-KV warps stage a few whole rows, or some columns of more rows, as many as fit in the
# shared memory of the queries. Head sizes that TILES lacks.
ROWS = (1, 8, 9, 32, 33)  # rows of a KV head; a CTA takes 32
FP8_SIZES, SIZES = (96, 128, 160, 192, 224, 256), (96, 224)
WARP_SPLIT = [(d, True) for d in FP8_SIZES] + [(d, False) for d in SIZES]


@SM100
@ONE_SCHEDULE
@pytest.mark.parametrize(
    ("head_dim", "fp8"), WARP_SPLIT, ids=[f"{d}, fp8" if f else str(d) for d, f in WARP_SPLIT]
)
def test_few_and_many_rows_of_warps_that_split_keys(
    head_dim: int, fp8: bool, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    Chosen(AttentionTile(head_dim, fp8=fp8, warp_split_kv=True)).use(monkeypatch)
    case = Case(ROWS, (1, 40, 9, 140, 33), 2, 2, head_dim=head_dim, fp8=fp8)
    check(on(op_device, case.problem().paged()), first_row=120)


@SM100
@pytest.mark.parametrize("case", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_every_schedule(case: Case, op_device: torch.device) -> None:
    check(on(op_device, case.problem().paged()))


@SM100
@ONE_SCHEDULE
def test_without_keys(op_device: torch.device) -> None:
    given = on(op_device, Case((2,), (2,), 2, 1, head_dim=64).problem().paged())
    check(given | {"kv_cache": given["kv_cache"][:0], "seq_lens": 0 * given["seq_lens"]})


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "D": (lambda _: Case((1,), (2,), 2, 1, head_dim=80).problem().paged(), "2 heads of D 80"),
    "row": (lambda _: Case((1,), (2,), 3, 1, head_dim=32).problem().paged(), "3 heads of D 32"),
    "dtype": (lambda g: {"out": (g["q"], new_nvfp4_rows(g["q"])[1])}, "out: .*bfloat16"),
    "rows": (lambda g: {"out": new_nvfp4_rows(g["q"][:2])}, "out: shape"),
    "scales": (lambda _: {"first_row": 126}, "out_scales: shape .* must be .2, 8, 32, 16. for"),
    "first_row": (lambda _: {"first_row": -1}, "first_row: is -1"),
    "scale's shape": (lambda _: {"output": Static(torch.ones(4))}, "output.global_scale: shape"),
    "scale's dtype": (
        lambda _: {"output": Static(torch.tensor(1, dtype=FP16))},
        "output.global_scale: dtype is float16, must be float32",
    ),
    "scale's type": (
        lambda _: {"output": Static(0.01)},
        "output.global_scale: is float, must be a tensor",
    ),
    "terms": (lambda g: {"output": g["output"]._replace(terms=2)}, "output.terms: is 2, must be 1"),
    "a tensor": (
        lambda _: {"output": ONE},
        r"output: is a Tensor, must be None or Static\(global_scale\)",
    ),
    "a scale per token": (
        lambda _: {"output": PerToken()},
        r"output: is a PerToken, must be None or Static\(global_scale\)",
    ),
    "16-bit, a pair": (
        lambda g: {"output": None, "out": new_nvfp4_rows(g["q"])},
        "out: is a pair of tensors, must be one tensor",
    ),
    "16-bit, first_row": (
        lambda _: {"output": None, "first_row": 3},
        "first_row: is 3, must be 0 for",
    ),
    "strides": (
        lambda g: {
            "out": (new_nvfp4_rows(g["q"])[0].mT.contiguous().mT, new_nvfp4_rows(g["q"])[1])
        },
        "out: strides",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_refused(name: str) -> None:
    change, message = CHANGES[name]
    given = DECODE.problem().paged() | {"output": Static(ONE)}
    with pytest.raises(InvalidArgument, match=message):
        paged_attention(**given | change(given))


def test_pair() -> None:
    given = DECODE.problem().paged() | {"output": Static(ONE)}
    with pytest.raises(InvalidArgument, match="out: is int, must be a pair of tensors"):
        paged_attention(**given, out=7)


def test_no_rows() -> None:
    given = DECODE.problem().paged()
    nobody = {"query_start": torch.zeros_like(given["query_start"]), "q": given["q"][:0]}
    out, _, lse = paged_attention(**given | nobody, output=Static(ONE))
    assert (len(out), len(lse)) == (0, 0)


def test_opcheck() -> None:
    given = DECODE.problem().paged()
    names = ("q", "kv_cache", "block_table", "seq_lens", "query_start", "sinks")
    tensors = [given.get(name) for name in names]
    memory = new_nvfp4_rows(given["q"])
    arguments = (
        *memory, *tensors, None, None, torch.tensor(0.01), 0, given["max_query_len"],
        given["max_seq_len"], None, True, None, None, None, False,
    )  # fmt: skip
    check_op(torch.ops.nvfp4.paged_attention_quantized.default, arguments)
