"""``quantize`` on sm_100: bit-identical to the reference."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument, PerToken, Static, quantize
from nvfp4_kernels.device.rowwise.tile import RowTile
from nvfp4_kernels.formats.nvfp4 import global_scale_of
from nvfp4_kernels.quantize import reference
from nvfp4_kernels.quantize.call import QuantizeCall
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels.bits import check_equal
from tests.test_kernels.rowwise.row_cases import (
    BF16,
    CASES,
    EVERY_CASE,
    EVERY_SCHEDULE,
    EVERY_TILE,
    FP32,
    Case,
    use_tile,
)

pytestmark = [pytest.mark.arch("sm_100"), pytest.mark.schedules("random 1")]


def check(x: Tensor, global_scale: Tensor, device: torch.device, terms: int = 1) -> None:
    found = quantize(x.to(device), Static(global_scale.to(device), terms))
    check_equal(found, reference.quantize(QuantizeCall(x, Static(global_scale, terms))))


def check_per_token(x: Tensor, device: torch.device, terms: int = 1) -> None:
    check_equal(
        quantize(x.to(device), PerToken(terms)),
        reference.quantize(QuantizeCall(x, PerToken(terms))),
    )


@EVERY_CASE
def test_quantize(case: Case, op_device: torch.device) -> None:
    x = case.random()
    check(x, global_scale_of(x) * 0.5, op_device)  # a few blocks saturate


@EVERY_CASE
def test_quantize_per_token(case: Case, op_device: torch.device) -> None:
    check_per_token(case.random(), op_device)


@EVERY_CASE
def test_terms(case: Case, op_device: torch.device) -> None:
    x = case.random()
    check(x, global_scale_of(x) * 0.5, op_device, terms=3)
    check_per_token(x, op_device, terms=2)


@EVERY_TILE
def test_terms_by_tiles(
    tile: RowTile, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 32 rows one atom holds the scales of all terms; beyond, each term has its own atoms."""
    use_tile(monkeypatch, "quantize", tile)
    for m, terms, batch in ((19, 4, (2,)), (32, 2, ()), (35, 3, ())):
        check_per_token(Case(m, 16 * 37, batch=batch).random(), op_device, terms)


@EVERY_SCHEDULE
def test_every_schedule(op_device: torch.device) -> None:
    x = CASES["ragged"].random()
    check(x, torch.tensor(0.003), op_device)
    check_per_token(x, op_device)
    check_per_token(x, op_device, terms=4)


@EVERY_TILE
def test_tiles(tile: RowTile, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tile(monkeypatch, "quantize", tile)
    check_per_token(Case(35, 16 * 37, batch=(2,)).random(), op_device)
    several_ctas_wide = Case(3, 16 * 131).random()
    check(several_ctas_wide, torch.tensor(0.003), op_device)


def test_every_magnitude(op_device: torch.device) -> None:
    """All finite bfloat16 values, including subnormals, at three global scales."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    x = every[every.isfinite()].view(-1, 16 * 15)
    for scale in (2.0**-110, 0.01, 2.0**119):
        check(x, torch.tensor(scale), op_device)
        check(x, torch.tensor(scale), op_device, terms=3)
    check_per_token(x[x.abs().amax(-1) > 2.0**-118], op_device)


def test_ties_and_neighbours(op_device: torch.device) -> None:
    """Midpoints of E2M1's grid, one ulp to either side, both signs; a block scale of one."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = [midpoints, midpoints.nextafter(torch.tensor(9.0)), midpoints.nextafter(torch.zeros(()))]
    rows = torch.zeros(6, 16)
    for row, values in enumerate([*near, *(-n for n in near)]):
        rows[row, :7], rows[row, 8] = values, 6.0
    check(rows, torch.tensor(1.0), op_device)


def test_zeros(op_device: torch.device) -> None:
    """Zero blocks, zero rows, and negative zeros."""
    x = torch.randn(7, 96, dtype=BF16)
    x[0] = x[1, 16:48] = 0.0
    x[2, ::3] = -0.0
    for terms in (1, 3):
        check(x, torch.tensor(0.002), op_device, terms)
        check_per_token(x, op_device, terms)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_not_finite_stays_visible(bad: float, op_device: torch.device) -> None:
    """NaN shows in its block's scale, infinity as largest code and scale, nothing elsewhere."""
    x = torch.randn(40, 64, dtype=BF16)
    x[3, 20] = x[39, 0] = bad
    x[3, 40] = -bad if bad == float("inf") else bad
    for terms in (1, 3):
        check(x, torch.tensor(0.002), op_device, terms)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_not_finite_rows(bad: float, op_device: torch.device) -> None:
    """A row with NaN or infinity has no defined values; other rows are right."""
    x = torch.randn(40, 64, dtype=BF16)
    x[3, 20] = bad
    found = [t.cpu() for t in quantize(x.to(op_device), PerToken())]
    expected = reference.quantize(QuantizeCall(x, PerToken()))
    torch.testing.assert_close(found[2], expected[2], rtol=0, atol=0, equal_nan=True)
    assert not found[2][3].isfinite() or bool(found[1].float().isnan().any())
    scales = [s.float() for s in (found[1], expected[1])]
    torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)
    others = torch.arange(40) != 3
    assert torch.equal(found[0][others], expected[0][others])


def test_spaced_rows(op_device: torch.device) -> None:
    """A slice of wider rows is read without a copy."""
    wide = torch.randn(2, 33, 256).to(BF16)
    x = wide.to(op_device)[..., 64:160]
    expected = wide[..., 64:160]
    check_equal(quantize(x, PerToken()), reference.quantize(QuantizeCall(expected, PerToken())))
    one = torch.tensor(0.01)
    check_equal(
        quantize(x, Static(one.to(op_device))),
        reference.quantize(QuantizeCall(expected, Static(one))),
    )


def test_dependent_launches(op_device: torch.device) -> None:
    """A second launch may start before the first has ended, and reads the first one's result."""
    x = torch.randn(32, 64)
    row_scale = quantize(x.to(op_device), PerToken())[2]
    found = quantize(row_scale.view(2, 16), PerToken())
    expected = reference.quantize(QuantizeCall(x, PerToken()))[2].view(2, 16)
    check_equal(found, reference.quantize(QuantizeCall(expected, PerToken())))


def test_arithmetic_is_ieee() -> None:
    """The PTX has no approximate reciprocal: the emulator's is too exact for results to show it."""
    with devices.emulated_ops(EAGER) as gpu:
        x = torch.ones(1, 16)
        for call in (lambda: quantize(x, Static(x[0, 0])), lambda: quantize(x, PerToken())):
            call()
            text = "\n".join(gpu.launches[-1].program.module.lines)
            assert "rcp.rn.f32" in text
            assert re.search(r"\.(approx|ftz)\b", text) is None


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("case", [Case(131, 80), Case(3, 4096, dtype=FP32)], ids=["bf16", "fp32"])
def test_each_byte_once(case: Case, terms: int) -> None:
    """Inputs are read from HBM once; results, padding included, are written once."""
    with devices.emulated_ops(EAGER) as gpu:
        x = case.random()
        written = quantize(x, PerToken(terms))
        counted = gpu.launches[-1].counters.nbytes
        assert counted["global read"] == x.nbytes
        assert counted["global write"] == sum(t.nbytes for t in written)
        assert counted["HBM write, each byte once"] == counted["global write"]
        written = quantize(x, Static(torch.tensor(0.01), terms))
        counted = gpu.launches[-1].counters.nbytes
        assert counted["HBM read, each byte once"] == x.nbytes + 4
        assert counted["global write"] == sum(t.nbytes for t in written)


@pytest.mark.parametrize("per_token", [False, True], ids=["static", "per token"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: x.mT, r"x: strides are \(1, 32\) .* side by side .* call contiguous\(\)"),
        (lambda x: x.view(4, 8, 32)[:, :7], "x: strides are .* evenly spaced; call contiguous"),
        (
            lambda x: x.view(-1)[8:520].view(16, 32),
            "x: starts 16 bytes past a multiple of 32.*clone",
        ),
        (lambda x: x.view(-1)[:720].view(18, 40)[:, :32], "x: its rows lie 80 bytes apart, must"),
    ],
    ids=["transposed", "uneven", "alignment", "row stride"],
)
def test_refused_layout(
    per_token: bool,
    make: Callable[[Tensor], Tensor],
    message: str,
    op_device: torch.device,
) -> None:
    x = make(torch.zeros(32, 32, dtype=BF16, device=op_device))
    with pytest.raises(InvalidArgument, match=message):
        quantize(x, PerToken() if per_token else Static(x.new_ones((), dtype=FP32)))


def test_refused_length(op_device: torch.device) -> None:
    x = torch.zeros(1, 40976, dtype=BF16, device=op_device)
    with pytest.raises(
        InvalidArgument, match="x: K is 40976, must be at most 40960; quantise long"
    ):
        quantize(x, PerToken())


def test_refused_empty_rows() -> None:
    with pytest.raises(InvalidArgument, match="x: K is 0, must be positive"):
        quantize(torch.zeros(2, 0), PerToken())
