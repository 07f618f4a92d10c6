"""``quantize`` to E4M3 rows on sm_90: bit-identical to the reference."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument, PerTokenFp8, StaticFp8, quantize
from nvfp4_kernels.device.row_vectors.tile import VectorTile, longest_row
from nvfp4_kernels.quantize import reference
from nvfp4_kernels.quantize.call import QuantizeCall
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels.bits import check_equal
from tests.test_kernels.rowwise.row_cases import (
    BF16,
    EVERY_CASE,
    EVERY_SCHEDULE,
    EVERY_VECTOR_TILE,
    FP16,
    FP32,
    Case,
    use_vector_tile,
)

pytestmark = [pytest.mark.arch("sm_90"), pytest.mark.schedules("random 1")]
SCALE = torch.tensor(0.0173)


def check(x: Tensor, device: torch.device, scale: Tensor = SCALE) -> None:
    found = quantize(x.to(device), StaticFp8(scale.to(device)))
    check_equal([found], reference.quantize(QuantizeCall(x, StaticFp8(scale))))


def check_per_token(x: Tensor, device: torch.device) -> None:
    expected = reference.quantize(QuantizeCall(x, PerTokenFp8()))
    check_equal(quantize(x.to(device), PerTokenFp8()), expected)


@EVERY_CASE
def test_static(case: Case, op_device: torch.device) -> None:
    x = case.random()
    check(x, op_device)
    check(x, op_device, torch.tensor(0.003))  # saturates


@EVERY_CASE
def test_per_token(case: Case, op_device: torch.device) -> None:
    check_per_token(case.random(), op_device)


@EVERY_SCHEDULE
def test_every_schedule(op_device: torch.device) -> None:
    x = Case(3, 16 * 37, batch=(2,)).random()
    check(x, op_device)
    check_per_token(x, op_device)


@EVERY_VECTOR_TILE
def test_tiles(tile: VectorTile, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of rows, whole rows, idle warps; a row ends inside a part, or where a part ends."""
    use_vector_tile(monkeypatch, "quantize.sm90", tile)
    for k in (tile.elements, tile.elements - 80):
        check_per_token(Case(3, k, dtype=FP16).random(), op_device)
    for k in (2 * tile.elements, 2 * tile.elements + 80):
        check(Case(3, k).random(), op_device)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_value(dtype: torch.dtype, op_device: torch.device) -> None:
    """All 16-bit values, among them NaN, infinities and subnormals, at several scales."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = every.view(-1, 16 * 256)
    for scale in (1.0, 0.0173, 2.0**-126, 2.0**119, 0.0, torch.inf, torch.nan):
        check(x, op_device, torch.tensor(scale))
    check_per_token(x, op_device)
    # Rows of neighbouring values: subnormals and the largest values have rows of their own.
    check_per_token(every.view(-1, 128), op_device)


def test_ties_and_neighbours(op_device: torch.device) -> None:
    """Midpoints of E4M3's grid, one ulp to either side, both signs; a scale of one."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    midpoints = (codes[:-1] + codes[1:]) / 2
    ends = torch.tensor(1e9), torch.tensor(0.0)
    x = torch.cat([midpoints, *(midpoints.nextafter(end) for end in ends), torch.zeros(6)])
    check(torch.stack([x, -x]), op_device, torch.tensor(1.0))


def test_the_reciprocal_multiplies(op_device: torch.device) -> None:
    """An element whose quotient by 13 is a tie; its product with the reciprocal is no tie."""
    x = torch.tensor([0.1650390625, -0.1650390625] * 8).view(1, 16)
    assert bool((x[0, 0] / 13 * 2**10 == 13).all())  # 6.5 steps of E4M3's subnormal numbers
    assert bool((x[0, 0] * (1 / torch.tensor(13.0)) * 2**10 != 13).all())
    check(x.to(BF16), op_device, torch.tensor(13.0))


def test_the_smallest_and_the_largest_rows(op_device: torch.device) -> None:
    """Zeros, rows whose scale is bounded, subnormal float32, and rows near float32's end."""
    x = torch.randn(8, 96)
    x[0] = 0.0
    x[1] *= 2.0**-130
    x[2] *= 2.0**-118
    x[3] *= 2.0**-117
    x[4] *= 2.0**125
    x[5] = -0.0
    x[6, 1:] = 0.0
    check_per_token(x, op_device)
    check(x, op_device, torch.tensor(2.0**-120))


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf], ids=str)
def test_not_finite_rows(bad: float, op_device: torch.device) -> None:
    """A NaN or infinity in the first, the last and a ragged vector, and one next to the other."""
    x = Case(5, 16 * 33).random()
    for row, column in ((1, 0), (2, -1), (3, 265)):
        x[row, column] = bad
    x[4, 3], x[4, 4] = torch.inf, bad
    check(x, op_device)
    check_per_token(x, op_device)


def test_spaced_rows(op_device: torch.device) -> None:
    """A slice of wider rows is read without a copy."""
    wide = torch.randn(2, 33, 256).to(BF16)
    x, expected = wide.to(op_device)[..., 72:168], wide[..., 72:168]
    output = StaticFp8(SCALE)
    check_equal(
        [quantize(x, StaticFp8(SCALE.to(op_device)))],
        reference.quantize(QuantizeCall(expected, output)),
    )
    check_equal(
        quantize(x, PerTokenFp8()), reference.quantize(QuantizeCall(expected, PerTokenFp8()))
    )


@EVERY_SCHEDULE
def test_dependent_launches(op_device: torch.device) -> None:
    """A second launch may start before the first has ended, and reads the first one's results."""
    x = torch.randn(32, 64)
    row_scale = quantize(x.to(op_device), PerTokenFp8())[1]
    found = quantize(row_scale.view(2, 16), StaticFp8(row_scale[3]))
    expected = reference.quantize(QuantizeCall(x, PerTokenFp8()))[1]
    again = QuantizeCall(expected.view(2, 16), StaticFp8(expected[3]))
    check_equal([found], reference.quantize(again))


def test_arithmetic_is_ieee() -> None:
    """The PTX has no approximate reciprocal: the emulator's is too exact for results to show it."""
    with devices.emulated_ops(EAGER, "sm_90") as gpu:
        x = torch.ones(1, 16)
        for output in (StaticFp8(x[0, 0]), PerTokenFp8()):
            quantize(x, output)
            text = "\n".join(gpu.launches[-1].program.module.lines)
            assert "rcp.rn.f32" in text
            assert re.search(r"\.(approx|ftz)\b", text) is None


@pytest.mark.parametrize("case", [Case(131, 80), Case(3, 4096, dtype=FP32)], ids=["bf16", "fp32"])
def test_each_byte_once(case: Case) -> None:
    """Inputs are read from HBM once; results, padding included, are written once."""
    with devices.emulated_ops(EAGER, "sm_90") as gpu:
        x = case.random()
        written = quantize(x, PerTokenFp8())
        counted = gpu.launches[-1].counters.nbytes
        assert counted["HBM read, each byte once"] == x.nbytes
        assert counted["global write"] == sum(t.nbytes for t in written)
        assert counted["HBM write, each byte once"] == counted["global write"]
        written = quantize(x, StaticFp8(torch.tensor(0.01)))
        counted = gpu.launches[-1].counters.nbytes
        assert counted["HBM read, each byte once"] == x.nbytes + 4
        assert counted["global write"] == written.nbytes


@pytest.mark.parametrize("per_token", [False, True], ids=["static", "per token"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: x.mT, r"x: strides are \(1, 32\) .* side by side .* call contiguous\(\)"),
        (lambda x: x.view(4, 8, 32)[:, :7], "x: strides are .* evenly spaced; call contiguous"),
        (
            lambda x: x.view(-1)[4:516].view(16, 32),
            "x: starts 8 bytes past a multiple of 16.*clone",
        ),
        (lambda x: x.view(-1)[:648].view(18, 36)[:, :32], "x: its rows lie 72 bytes apart, must"),
    ],
    ids=["transposed", "uneven", "alignment", "row stride"],
)
def test_refused_layout(
    per_token: bool, make: Callable[[Tensor], Tensor], message: str, op_device: torch.device
) -> None:
    x = make(torch.zeros(32, 32, dtype=BF16, device=op_device))
    with pytest.raises(InvalidArgument, match=message):
        quantize(x, PerTokenFp8() if per_token else StaticFp8(x.new_ones((), dtype=FP32)))


@pytest.mark.parametrize(("dtype", "words"), [(BF16, 4), (FP32, 8)], ids=["bf16", "fp32"])
def test_refused_length(dtype: torch.dtype, words: int, op_device: torch.device) -> None:
    longest = longest_row(words)
    check_per_token(Case(1, longest, dtype=dtype).random(), op_device)
    x = torch.zeros(1, longest + 16, dtype=dtype, device=op_device)
    message = f"x: K is {longest + 16}, must be at most {longest}; quantise longer rows with Static"
    with pytest.raises(InvalidArgument, match=message):
        quantize(x, PerTokenFp8())
