"""``moe_combine`` on GPUs: bit-identical to the reference."""

import math
from importlib import import_module

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument, moe_combine
from nvfp4_kernels.moe.combine import reference
from nvfp4_kernels.moe.combine.choose import MAX_THREADS, CombineTile, choose_config
from tests import devices
from tests.emulator import EAGER, STANDARD
from tests.test_kernels.bits import check_equal
from tests.test_kernels.moe.combine.test_moe_combine import combine_arguments
from tests.test_kernels.routing_cases import CASES, KINDS, RoutingCase
from tests.test_kernels.rowwise.row_cases import TWO_SCHEDULES

pytestmark = pytest.mark.schedules("random 1")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SM90, SM100 = pytest.mark.arch("sm_90"), pytest.mark.arch("sm_100")
# Several vectors per thread: some lie beyond the end of a row, or none.
RAGGED, EXACT = CombineTile(32, 4, ragged=True), CombineTile(32, 2, ragged=False)


def check(
    y: Tensor, rows: Tensor, weights: Tensor | None, out_dtype: torch.dtype, device: torch.device
) -> None:
    expected = reference.moe_combine(y, rows, weights, out_dtype)
    given = (x if x is None else x.to(device) for x in (y, rows, weights))
    check_equal([moe_combine(*given, out_dtype)], [expected])


def use(patch: pytest.MonkeyPatch, tile: CombineTile) -> None:
    """Make the op use ``tile`` for any batch."""
    patch.setattr(
        import_module("nvfp4_kernels.moe.combine.kernel"), "choose_config", lambda *_: tile
    )


@SM100
@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_cases(case: RoutingCase, op_device: torch.device) -> None:
    check(*combine_arguments(case, 48), BF16, op_device)


@SM90
def test_on_hopper(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    check(*combine_arguments(CASES["ids of no expert"], 48), BF16, op_device)
    use(monkeypatch, RAGGED)
    check(*combine_arguments(CASES["ids of no expert"], 1344), BF16, op_device)


@pytest.mark.parametrize(
    ("top_k", "dtype"),
    [(1, BF16), (2, FP16), (3, FP32), (8, BF16), (8, FP16), (10, FP32), (32, BF16)],
)
def test_slots_and_dtypes(top_k: int, dtype: torch.dtype, op_device: torch.device) -> None:
    y, rows, weights = combine_arguments(RoutingCase(5, top_k, 40), 24, dtype)
    rows[0, -1] = rows[1, 0] = -1
    rows[2] = -1
    check(y, rows, weights, BF16 if dtype == FP32 else FP32, op_device)
    check(y, rows, None, dtype, op_device)


@SM100
def test_parts_of_rows(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 2688 elements takes three CTAs; some threads have no elements."""
    case = RoutingCase(3, 6, 7, ids="hostile")
    check(*combine_arguments(case, 2688), BF16, op_device)
    for tile, h in ((RAGGED, 1344), (EXACT, 1024)):
        use(monkeypatch, tile)
        check(*combine_arguments(case, h), BF16, op_device)
    use(monkeypatch, EXACT)
    check(*combine_arguments(RoutingCase(3, 20, 24), 512), FP32, op_device)


def test_sums_round_one_by_one(op_device: torch.device) -> None:
    """Each product is rounded before it is added, unlike in a fused multiply-add."""
    y = torch.full((1, 8, 8), 1 + 2.0**-12)
    rows = torch.arange(8, dtype=torch.int32).view(1, 8)
    weights = torch.full((1, 8), 1 - 2.0**-13)
    check(y, rows, weights, FP32, op_device)


def test_numbers_of_dropped_slots_are_not_used(op_device: torch.device) -> None:
    """Weights of dropped slots and padding rows are not used; NaN stays in its token."""
    y = torch.full((1, 8, 16), math.nan)
    y[0, :3] = torch.randn(3, 16)
    rows = torch.tensor([[0, -1], [-1, -1], [1, 5], [-1, 2]], dtype=torch.int32)
    weights = torch.rand(4, 2).where(rows >= 0, math.nan)
    found = moe_combine(*(x.to(op_device) for x in (y, rows, weights))).cpu()
    assert found.isnan().any(1).tolist() == [False, False, True, False]
    assert not found[1].any()


def test_negative_zero(op_device: torch.device) -> None:
    """A sum begins with +0, so that a single −0 gives +0."""
    y = torch.full((1, 8, 8), -0.0)
    check(y, torch.zeros(1, 1, dtype=torch.int32), None, FP32, op_device)


@TWO_SCHEDULES
def test_dependent_launches(op_device: torch.device) -> None:
    """A second launch may start before the first has ended, and reads the first one's result."""
    y, rows, _ = combine_arguments(RoutingCase(8, 2, 4), 16)
    first = moe_combine(y.to(op_device), rows.to(op_device))
    same = torch.arange(8, dtype=torch.int32, device=op_device).unsqueeze(1)
    check_equal([moe_combine(first.unsqueeze(0), same)], [first])


def test_each_byte_once() -> None:
    """Rows of slots are read and the result written once; other rows are never read."""
    with devices.emulated_ops(EAGER) as gpu:
        y, rows, weights = combine_arguments(CASES["linear map"], 64)
        written = moe_combine(y, rows, weights)
        counted = gpu.launches[-1].counters.nbytes
    of_slots = int((rows >= 0).sum()) * 64 * 2
    numbers = rows.nbytes + weights.nbytes
    assert counted["HBM read, each byte once"] == of_slots + numbers
    assert counted["global read"] == of_slots + numbers  # one warp per token reads each
    assert counted["global write"] == written.nbytes


def test_same_bits_whatever_the_batch(op_device: torch.device) -> None:
    """A token's sum does not depend on the other tokens of the batch."""
    y, rows, weights = (x.to(op_device) for x in combine_arguments(CASES["128 experts"], 32))
    whole = moe_combine(y, rows, weights)
    for at in (0, 32):
        alone = moe_combine(y, rows[at : at + 1].clone(), weights[at : at + 1].clone())
        check_equal([alone], [whole[at : at + 1]])


def test_choose_config() -> None:
    """Many tokens get several vectors per thread; ``ragged``: vectors may cross a row's end."""
    chosen = [choose_config(1, h, 2, 148) for h in (8, 2048, 2688, 5120, 7168)]
    assert [tile.threads for tile in chosen] == [32, 128, 128, 128, 128]
    assert [tile.ragged for tile in chosen] == [True, False, True, False, False]
    assert {tile.steps for tile in chosen} == {1}
    assert choose_config(256, 7168, 2, 148) == CombineTile(128, 4, ragged=True)
    assert choose_config(1024, 4096, 2, 148) == CombineTile(128, 4, ragged=False)
    for h in range(4, 9000, 4):
        for m in (1, 4096):
            assert choose_config(m, h, 4, 148).threads <= MAX_THREADS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y, rows, w: (y.mT.contiguous().mT, rows, w), "y: strides are .* call .contiguous"),
        (lambda y, rows, w: (y[..., :12].contiguous(), rows, w), "y: H is 12, must be a mult.* 8"),
        (lambda y, rows, w: (y, rows.mT.contiguous().mT, w), "rows: strides are"),
        (lambda y, rows, w: (y, rows, w.mT.contiguous().mT), "topk_weights: strides are"),
    ],
)
def test_refused_layout(change: object, message: str, op_device: torch.device) -> None:
    y = torch.zeros(1, 8, 16, dtype=BF16, device=op_device)
    rows = torch.zeros(3, 2, dtype=torch.int32, device=op_device)
    weights = torch.zeros(3, 2, device=op_device)
    with pytest.raises(InvalidArgument, match=message):
        moe_combine(*change(y, rows, weights))


def test_same_bits_whatever_the_schedule() -> None:
    arguments = combine_arguments(CASES["384 experts"], 16)
    results = []
    for schedule in STANDARD:
        with devices.emulated_ops(schedule):
            results.append(moe_combine(*arguments))
    for other in results[1:]:
        assert torch.equal(other, results[0])
