"""``merge_segments``: the reference against float64 and attention, sm_100 against the reference."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nvfp4_kernels import InvalidArgument, NoKernelError, merge_segments
from nvfp4_kernels.attention import reference as attention_reference
from nvfp4_kernels.attention.call import AttentionCall
from nvfp4_kernels.attention.merge import op as merge_op
from nvfp4_kernels.attention.merge import reference
from nvfp4_kernels.attention.merge.choose import choose_prefetch
from tests import devices
from tests.emulator import EAGER, STANDARD
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.strategies import PROPERTY

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SM100 = pytest.mark.arch("sm_100")
ONE_SCHEDULE = pytest.mark.schedules("random 1")
EVERY_SCHEDULE = pytest.mark.schedules(*(schedule.name for schedule in STANDARD))
Result = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    segments: int
    shape: tuple[int, ...]  # shape of an lse
    head_dim: int
    dtype: torch.dtype = FP32
    out_dtype: torch.dtype = BF16
    sinks: bool = False

    def arguments(self) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype]:
        """Arguments: a third of the segments have no keys; half of them have a NaN result."""
        outs = torch.randn(self.segments, *self.shape, self.head_dim).to(self.dtype)
        lses = 4 * torch.randn(self.segments, *self.shape)
        empty = torch.rand(lses.shape)
        lses[empty < 0.3], lses[empty < 0.1] = -torch.inf, torch.inf
        outs[empty < 0.2] = math.nan
        sinks = torch.randn(self.shape[-1]) if self.sinks else None
        return outs, lses, sinks, self.out_dtype


CASES = {
    "one segment": Case(1, (3, 2), 64),
    "one row": Case(5, (1,), 16),
    "no rows": Case(4, (0, 8), 128),
    "two segments": Case(2, (7, 5), 80),
    "fp16 result": Case(6, (5, 4), 64, out_dtype=FP16),
    "fp32 result": Case(7, (5, 4), 64, out_dtype=FP32, sinks=True),
    "bf16 segments": Case(3, (9, 4), 96, BF16, FP32),
    "fp16 segments": Case(3, (9, 4), 24, FP16, FP16, sinks=True),
    "sinks": Case(8, (6, 3), 128, sinks=True),
    "more dimensions": Case(4, (2, 3, 5), 16, sinks=True),
    "17 segments": Case(17, (3, 4), 32, sinks=True),
    "64 segments": Case(64, (1, 3), 128),
    "65 segments": Case(65, (2, 2), 64, BF16, sinks=True),
    "head dim 256": Case(3, (2, 2), 256),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def formula(outs: Tensor, lses: Tensor, sinks: Tensor | None) -> Result:
    """Compute the merge in float64, row by row."""
    rows, head_dim = lses[0].numel(), outs.shape[-1]
    flat = outs.double().reshape(len(outs), rows, head_dim)
    out, lse = torch.zeros(rows, head_dim).double(), torch.full((rows,), -math.inf).double()
    for row, logs in enumerate(lses.double().reshape(len(outs), rows).T.tolist()):
        logs = {segment: log for segment, log in enumerate(logs) if not math.isinf(log)}
        terms = list(logs.values())
        if sinks is not None:
            terms.append(float(sinks[row % len(sinks)]))
        terms = [t for t in terms if t > -math.inf]
        if terms:
            top = max(terms)
            lse[row] = top + math.log(math.fsum(math.exp(t - top) for t in terms))
        for segment, log in logs.items():
            out[row] += math.exp(log - lse[row]) * flat[segment, row]
    return out.view(outs.shape[1:]), lse.view(lses.shape[1:])


def check(found: Result, expected: Result, out_dtype: torch.dtype) -> None:
    """Check within one rounding to ``out_dtype`` and float32's errors: up to 65 terms within ±5.

    Weights are off by 2⁻²² for exp2 and its argument, which is below 64 and so has 6 bits fewer.
    """
    out, lse = found
    assert out.dtype == out_dtype
    assert lse.dtype == FP32
    half_ulp = 0 if out_dtype == FP32 else torch.finfo(out_dtype).eps / 2
    exact, log = (x.double() for x in expected)
    torch.testing.assert_close(out.cpu().double(), exact, rtol=half_ulp, atol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), log, rtol=2e-7, atol=2e-6)


# --- the formula ------------------------------------------------------------------------------


@EVERY_CASE
def test_reference(case: Case) -> None:
    outs, lses, sinks, out_dtype = case.arguments()
    expected = formula(outs, lses, sinks)
    check(merge_segments(outs, lses, sinks, out_dtype), expected, out_dtype)


def test_default_dtype() -> None:
    outs = torch.ones(2, 3, 8, dtype=FP16)
    assert merge_segments(outs, torch.zeros(2, 3))[0].dtype == FP16


INF, NAN = math.inf, math.nan
# Each row: results and lses of its segments; the merged result and lse.
EDGES = {
    "equal": ([(1.0, 2.0), (3.0, 2.0)], (2.0, 2.0 + math.log(2))),
    "one empty": ([(NAN, -INF), (3.0, 2.0)], (3.0, 2.0)),
    "one infinite": ([(NAN, INF), (3.0, 2.0)], (3.0, 2.0)),
    "all empty": ([(NAN, -INF), (NAN, -INF)], (0.0, -INF)),
    "all infinite": ([(NAN, INF), (NAN, -INF)], (0.0, -INF)),
    "far apart": ([(5.0, 300.0), (7.0, -300.0)], (5.0, 300.0)),
    "very small": ([(2.0, -1e30), (4.0, -1e30)], (3.0, -1e30)),
}


def check_edges(device: torch.device) -> None:
    """Check edge cases without sinks, with sinks of −inf (equal to none), and with sinks of 0."""
    rows = torch.tensor([row for row, _ in EDGES.values()]).transpose(0, 1)
    outs = rows[..., :1].expand(-1, -1, 8).unsqueeze(2).contiguous().to(device)
    lses = rows[..., 1:].contiguous().to(device)
    expected = torch.tensor([result for _, result in EDGES.values()])
    for sinks in (None, torch.tensor([-INF], device=device)):
        out, lse = merge_segments(outs, lses, sinks)
        assert torch.equal(out[:, 0, 0].cpu(), expected[:, 0])
        torch.testing.assert_close(lse[:, 0].cpu(), expected[:, 1])
    out, lse = merge_segments(outs, lses, torch.zeros(1, device=device))
    share = expected[:, 1].sigmoid()
    torch.testing.assert_close(out[:, 0, 0].cpu(), expected[:, 0] * share)
    torch.testing.assert_close(lse[:, 0].cpu(), torch.nn.functional.softplus(expected[:, 1]))


def test_edges() -> None:
    check_edges(torch.device("cpu"))


# --- properties -------------------------------------------------------------------------------

lses_of_segments = st.lists(
    st.floats(-60, 60, width=32) | st.sampled_from([-math.inf, math.inf]), min_size=1, max_size=9
)


@PROPERTY
@given(lses_of_segments, st.none() | st.floats(-60, 60, width=32), st.data())
def test_any_order_and_any_nesting(
    logs: list[float], sink: float | None, data: st.DataObject
) -> None:
    lses = torch.tensor(logs).view(-1, 1)
    outs = torch.randn(len(logs), 1, 8)
    sinks = None if sink is None else torch.tensor([sink])
    expected = formula(outs, lses, sinks)
    check(merge_segments(outs, lses, sinks), expected, FP32)
    order = data.draw(st.permutations(range(len(logs))))
    check(merge_segments(outs[order], lses[order], sinks), expected, FP32)
    cut = data.draw(st.integers(1, len(logs)))
    parts = [merge_segments(outs[part], lses[part]) for part in (order[:cut], order[cut:]) if part]
    both = (torch.stack(x) for x in zip(*parts, strict=True))
    check(merge_segments(*both, sinks), expected, FP32)


@PROPERTY
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.booleans(), st.data())
def test_splitting_changes_nothing(sizes: list[int], sinks: bool, data: st.DataObject) -> None:
    """Attention over any disjoint sets of keys, some empty, merges into attention over all keys."""
    queries, heads, keys = 3, 4, sum(sizes)
    q = torch.randn(1, queries, heads, 16)
    k, v = torch.randn(2, 1, keys, 2, 16)
    sink = torch.randn(heads) if sinks else None
    scoring = 0.5, False, None, data.draw(st.sampled_from([None, 4.0]))

    def attend(chosen: list[int], sink: Tensor | None = None) -> Result:
        lengths = None, None, None, None
        some = k[:, chosen], v[:, chosen]
        return attention_reference.attention(AttentionCall(q, *some, sink, *lengths, *scoring))

    order = data.draw(st.permutations(range(keys)))
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    parts = [attend(order[a:b]) for a, b in itertools.pairwise(ends)]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out, lse = merge_segments(outs, lses, sink)
    whole_out, whole_lse = attend(list(range(keys)), sink)
    torch.testing.assert_close(out, whole_out, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-5)


# --- sm_100 -----------------------------------------------------------------------------------


def check_case(case: Case, device: torch.device) -> None:
    arguments = case.arguments()
    given = (x.to(device) if isinstance(x, Tensor) else x for x in arguments)
    check(merge_segments(*given), formula(*arguments[:3]), case.out_dtype)


@SM100
@ONE_SCHEDULE
@EVERY_CASE
def test_cases(case: Case, op_device: torch.device) -> None:
    check_case(case, op_device)


@SM100
@EVERY_SCHEDULE
def test_every_schedule(op_device: torch.device) -> None:
    check_case(CASES["17 segments"], op_device)


@SM100
@ONE_SCHEDULE
def test_edges_sm100(op_device: torch.device) -> None:
    check_edges(op_device)


@SM100
@ONE_SCHEDULE
@pytest.mark.parametrize("segments", [1, 2, 8, 32])
def test_equal_weights_are_exact(segments: int, op_device: torch.device) -> None:
    """Integer sums divided by a power of two are exact; a single segment is unchanged."""
    outs = torch.randint(-64, 64, (segments, 5, 32)).float()
    outs[:, 0] = torch.randn(1, 32)
    lses = torch.randn(5).expand(segments, 5).contiguous()
    out, lse = merge_segments(outs.to(op_device), lses.to(op_device))
    assert torch.equal(out[1:].cpu(), outs[:, 1:].mean(0))
    torch.testing.assert_close(lse.cpu(), lses[0] + math.log(segments), rtol=1e-7, atol=1e-6)
    if segments == 1:
        assert torch.equal(out.cpu(), outs[0])
        assert torch.equal(lse.cpu(), lses[0])


@SM100
@ONE_SCHEDULE
def test_not_a_number(op_device: torch.device) -> None:
    """NaN in the result or the lse of a segment with keys makes that row NaN, and no other row."""
    outs, lses = torch.randn(3, 4, 8), torch.randn(3, 4)
    outs[1, 1, 5], lses[2, 2] = math.nan, math.nan
    expected = reference.merge_segments(outs, lses, None, FP32)
    found = merge_segments(outs.to(op_device), lses.to(op_device))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu().isnan(), theirs.isnan())
    assert found[0].isnan().sum() == 1 + 8


@SM100
@EVERY_SCHEDULE
def test_dependent_launches(op_device: torch.device) -> None:
    """A second merge may start before the first has ended, and reads the first one's result."""
    outs, lses = torch.randn(4, 2, 3, 16, device=op_device), torch.randn(4, 2, 3, device=op_device)
    first = merge_segments(outs, lses)
    both = [x.unsqueeze(0) for x in first]
    found = merge_segments(*both)
    for ours, theirs in zip(found, first, strict=True):
        assert torch.equal(ours, theirs)


def test_each_byte_once() -> None:
    """Segments with keys are read once; all threads of a row read its lse, once from HBM."""
    with devices.emulated_ops(EAGER) as gpu:
        outs, lses, sinks = torch.randn(9, 40, 4, 32), torch.randn(9, 40, 4), torch.randn(4)
        lses[:5, 7] = -torch.inf
        written = merge_segments(outs, lses, sinks, BF16)
        counted = gpu.launches[-1].counters.nbytes
    threads = 32 // 4  # threads of a row
    with_keys = outs.nbytes - outs[:5, 7].nbytes
    assert counted["global read"] == (lses.nbytes + lses[0].nbytes) * threads
    assert counted["cp.async"] == outs.nbytes // 9 * 16  # zeros where no segment is
    assert counted["HBM read, each byte once"] == with_keys + lses.nbytes + sinks.nbytes
    assert counted["global write"] == sum(x.nbytes for x in written)


def test_same_bits_whatever_the_schedule() -> None:
    case = CASES["17 segments"]
    arguments = case.arguments()
    results = []
    for schedule in STANDARD:
        with devices.emulated_ops(schedule):
            results.append(merge_segments(*arguments))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_choose_prefetch() -> None:
    chosen = [choose_prefetch(n, 256, 512) for n in (1, 2, 3, 4, 5, 16, 17, 64)]
    assert chosen == [1, 2, 4, 4, 8, 16, 16, 16]
    by_rows = [choose_prefetch(16, rows, 512) for rows in (1, 1000, 4096, 8192, 100_000)]
    assert by_rows == [16, 16, 8, 4, 1]


# --- compilation and errors -------------------------------------------------------------------


def test_opcheck() -> None:
    check_op(torch.ops.nvfp4.merge_segments.default, CASES["more dimensions"].arguments())


def test_compiled() -> None:
    def layer(outs: Tensor, lses: Tensor, sinks: Tensor) -> Result:
        return merge_segments(outs, lses, sinks, BF16)

    cases = [Case(3, (tokens, 5), 16, sinks=True) for tokens in (7, 20)]
    check_compiled(layer, [(case.arguments()[:3], {}) for case in cases], graphs=1)


ARGUMENTS = {"outs": torch.zeros(2, 3, 4, 16), "lses": torch.zeros(2, 3, 4), "sinks": torch.ones(4)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"outs": ARGUMENTS["outs"].double()}, "outs: dtype is float64, must be float32, bfloat16"),
        ({"outs": torch.zeros(16)}, r"outs: shape is \(16,\), must be \(S, ..., D\) with S and D"),
        ({"outs": ARGUMENTS["outs"][:0]}, r"outs: shape is \(0, 3, 4, 16\), must be \(S, ..., D\)"),
        ({"outs": ARGUMENTS["outs"][..., :0]}, r"outs: shape is \(2, 3, 4, 0\), must be"),
        ({"lses": ARGUMENTS["lses"].half()}, "lses: dtype is float16, must be float32"),
        ({"lses": ARGUMENTS["lses"][:1]}, r"lses: shape is \(1, 3, 4\), must be \(2, 3, 4\)"),
        ({"sinks": torch.ones(4).double()}, "sinks: dtype is float64, must be float32"),
        ({"sinks": torch.ones(3)}, r"sinks: shape is \(3,\), must be \(4,\); one per head"),
        (
            {"outs": torch.zeros(2, 16), "lses": torch.zeros(2)},
            r"lses: shape is \(2,\), must be \(S, ..., H\) with sinks; unsqueeze",
        ),
        ({"out_dtype": torch.float64}, "out_dtype: is float64, must be one of float32, bfloat16"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else "",
)
def test_refused_arguments(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        merge_segments(**ARGUMENTS | changed)


@SM100
@ONE_SCHEDULE
def test_refused_layout(op_device: torch.device) -> None:
    outs, lses, _ = (x.to(op_device) for x in ARGUMENTS.values())
    late = torch.zeros(2 * 3 * 4 * 16 + 1, device=op_device)[1:].view(outs.shape)
    for arguments, message in (
        ((outs.transpose(1, 2), lses.transpose(1, 2)), "outs: strides are .* call .contiguous"),
        ((late, lses), "outs: starts 4 bytes after a multiple of 16, must start at one; .*clone"),
        ((outs, lses.transpose(1, 2).contiguous().transpose(1, 2)), "lses: strides are"),
        ((outs, lses, torch.ones(8, device=op_device)[::2]), "sinks: strides are"),
        ((outs[..., :6].contiguous(), lses), "outs: D is 6, must be a multiple of 4, 16 bytes"),
        ((outs[..., :12].half().contiguous(), lses), "outs: D is 12, must be a multiple of 8"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            merge_segments(*arguments)


def test_devices() -> None:
    outs, lses, sinks = ARGUMENTS.values()
    merge = merge_op._merge_segments._init_fn
    with pytest.raises(InvalidArgument, match="lses: is on meta, must be on cpu as outs is"):
        merge(outs, lses.to("meta"), None, FP32)
    with pytest.raises(InvalidArgument, match="sinks: is on meta, must be on cpu as outs is"):
        merge(outs, lses, sinks.to("meta"), FP32)
    with pytest.raises(NoKernelError, match="merge_segments: no float kernel for meta"):
        merge(outs.to("meta"), lses.to("meta"), None, FP32)
