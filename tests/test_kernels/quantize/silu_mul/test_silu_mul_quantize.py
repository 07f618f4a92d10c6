"""``silu_mul_quantize``: the reference against vLLM, sm_100 against the reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.activation import SiluAndMul

from nvfp4_kernels import InvalidArgument, NoKernelError, PerToken, Static, silu_mul_quantize
from nvfp4_kernels.device.rowwise.tile import RowTile
from nvfp4_kernels.quantize import reference as plain
from nvfp4_kernels.quantize.call import QuantizeCall, SiluMulQuantizeCall
from nvfp4_kernels.quantize.silu_mul import op as silu_op
from nvfp4_kernels.quantize.silu_mul import reference
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels.bits import bits, check_equal
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.rowwise.row_cases import (
    BF16,
    CASES,
    EVERY_CASE,
    EVERY_SCHEDULE,
    EVERY_TILE,
    FP16,
    FP32,
    Case,
    use_tile,
)

SCALE = torch.tensor(0.01)
SM100 = pytest.mark.arch("sm_100")
ONE_SCHEDULE = pytest.mark.schedules("random 1")


def random_input(case: Case) -> Tensor:
    return 4 * replace(case, k=2 * case.k).random()


def grid_input(case: Case) -> Tensor:
    """Gates whose silu is exactly the gate or zero in float32, for any approximation of exp."""
    gate = torch.tensor([0.0, 32.0, 64.0, -256.0])[torch.randint(4, case.shape)]
    up = torch.tensor([0.5, -1.0, 3.0, -6.0, 0.0])[torch.randint(5, case.shape)]
    return torch.cat([gate, up], dim=-1).to(case.dtype)


# --- the formula ------------------------------------------------------------------------------


@EVERY_CASE
def test_reference(case: Case) -> None:
    x = random_input(case)
    product = SiluAndMul.forward_native(x)
    check_equal(
        silu_mul_quantize(x, Static(SCALE)), plain.quantize(QuantizeCall(product, Static(SCALE)))
    )
    check_equal(silu_mul_quantize(x, PerToken()), plain.quantize(QuantizeCall(product, PerToken())))


# --- sm_100 -----------------------------------------------------------------------------------


def check_exact(x: Tensor, device: torch.device, terms: int = 1) -> None:
    scale = torch.tensor(0.25)
    found = silu_mul_quantize(x.to(device), Static(scale.to(device), terms))
    check_equal(found, reference.silu_mul_quantize(SiluMulQuantizeCall(x, Static(scale, terms))))
    found_per_token = silu_mul_quantize(x.to(device), PerToken(terms))
    check_equal(
        found_per_token, reference.silu_mul_quantize(SiluMulQuantizeCall(x, PerToken(terms)))
    )


@SM100
@ONE_SCHEDULE
@EVERY_CASE
def test_grid_values_are_exact(case: Case, op_device: torch.device) -> None:
    check_exact(grid_input(case), op_device)


@SM100
@EVERY_SCHEDULE
def test_every_schedule(op_device: torch.device) -> None:
    check_exact(grid_input(CASES["ragged"]), op_device)


@SM100
@ONE_SCHEDULE
@EVERY_TILE
def test_tiles(tile: RowTile, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tile(monkeypatch, "quantize.silu_mul", tile)
    check_exact(grid_input(Case(3, 16 * 37, batch=(2,))), op_device)


@SM100
@ONE_SCHEDULE
@pytest.mark.parametrize("terms", [2, 3, 4])
@pytest.mark.parametrize("m", [3, 35])
def test_terms(m: int, terms: int, op_device: torch.device) -> None:
    check_exact(grid_input(Case(m, 16 * 37, batch=(2,))), op_device, terms)


def bounds(x: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper bound of the kernel's product, rounded as the kernel rounds.

    16-bit types: e^-x is off by |x| · 2⁻²⁴ for the rounding of x · log2(e), as much again for that
    constant, and the 2 ulp of exp2; the sum by half an ulp, the reciprocal by one, the product by
    half. float32: 2 ulp of exp, three operations that round.
    """
    gate, up = x.chunk(2, dim=-1)
    exact = gate.double() / (1 + torch.exp(-gate.double()))
    ulps = 8.0 if x.dtype == FP32 else 2 * gate.double().abs() + 8
    ends = [(exact * (1 + sign * ulps * 2.0**-24)).to(x.dtype) * up for sign in (-1, 1)]
    return ends[0], ends[1]


@SM100
@ONE_SCHEDULE
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_random_values(dtype: torch.dtype, op_device: torch.device) -> None:
    """Rounding is monotone: where both bounds give the same block, the kernel must as well."""
    case = Case(37, 400, dtype=dtype)
    x = random_input(case)
    ends = [plain.quantize(QuantizeCall(end, Static(SCALE))) for end in bounds(x)]
    found = silu_mul_quantize(x.to(op_device), Static(SCALE.to(op_device)))
    codes = [bits(data).view(37, 25, 8) for data, _ in (*ends, found)]
    settled = (codes[0] == codes[1]).all(-1)
    assert settled.float().mean() > 0.9
    assert torch.equal(codes[2][settled], codes[0][settled])
    scales = [bits(scale) for _, scale in (*ends, found)]
    same = scales[0] == scales[1]
    assert same.float().mean() > 0.99
    assert torch.equal(scales[2][same], scales[0][same])


@SM100
@ONE_SCHEDULE
def test_not_finite(op_device: torch.device) -> None:
    gate_up = torch.ones(5, 64, dtype=BF16)
    gate_up[0, 3], gate_up[1, 40], gate_up[2, 20], gate_up[3, 21] = (
        torch.nan, torch.nan, torch.inf, -torch.inf,
    )  # fmt: skip
    found = silu_mul_quantize(gate_up.to(op_device), Static(SCALE.to(op_device)))[1].cpu().float()
    expected = reference.silu_mul_quantize(SiluMulQuantizeCall(gate_up, Static(SCALE)))[1].float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@SM100
@ONE_SCHEDULE
def test_spaced_rows(op_device: torch.device) -> None:
    wide = grid_input(Case(20, 96))
    found = silu_mul_quantize(wide.to(op_device)[:, 32:160], Static(SCALE.to(op_device)))
    check_equal(
        found, reference.silu_mul_quantize(SiluMulQuantizeCall(wide[:, 32:160], Static(SCALE)))
    )


@SM100
@ONE_SCHEDULE
def test_dependent_launches(op_device: torch.device) -> None:
    """A launch may start before its predecessor has ended, and reads the predecessor's result."""
    x = grid_input(Case(32, 32)).to(op_device)
    *_, row_scale = silu_mul_quantize(x, PerToken())
    gate_up = row_scale.view(1, 32)
    found = silu_mul_quantize(gate_up, PerToken())
    check_equal(found, silu_mul_quantize(gate_up.clone(), PerToken()))


def test_each_byte_once() -> None:
    with devices.emulated_ops(EAGER) as gpu:
        x = random_input(Case(131, 80))
        written = silu_mul_quantize(x, PerToken())
        counted = gpu.launches[-1].counters.nbytes
        assert counted["global read"] == x.nbytes
        assert counted["global write"] == sum(t.nbytes for t in written)


# --- compilation and errors -------------------------------------------------------------------


@pytest.mark.processes
def test_opcheck() -> None:
    x = random_input(CASES["batch of batches"])
    for terms in (1, 2):
        check_op(torch.ops.nvfp4.silu_mul_quantize.default, (x, SCALE, terms))
        check_op(torch.ops.nvfp4.silu_mul_quantize_per_token.default, (x, terms))


def test_compiled() -> None:
    inputs = [random_input(replace(CASES["ragged"], m=m)) for m in (5, 40, 128)]
    for output in (Static(SCALE), PerToken()):
        check_compiled(silu_mul_quantize, [((x, output), {}) for x in inputs], graphs=1)


OUTPUTS = [Static(SCALE), PerToken()]


@pytest.mark.parametrize("output", OUTPUTS, ids=["static", "per token"])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 48), "gate_up: last dimension is 48, must be a multiple of 32: gate and"),
        (torch.zeros(32), r"gate_up: shape is \(32,\), must have at least 2 dimensions"),
        (torch.zeros(2, 0), "gate_up: K is 0, must be positive"),
        (torch.zeros(2, 32, dtype=torch.float64), "gate_up: dtype is float64, must be bfloat16"),
    ],
    ids=["width", "1-D", "empty", "dtype"],
)
def test_refused_input(output: Static | PerToken, x: Tensor, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        silu_mul_quantize(x, output)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(2), r"output.global_scale: shape is \(2,\).* for a scale per token: PerToken"),
        (torch.ones((), dtype=BF16), "output.global_scale: dtype is bfloat16, must be float32"),
    ],
    ids=["per row", "dtype"],
)
def test_refused_global_scale(scale: Tensor, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        silu_mul_quantize(torch.zeros(2, 32), Static(scale))


@SM100
@ONE_SCHEDULE
@pytest.mark.parametrize("output", OUTPUTS, ids=["static", "per token"])
def test_refused_layout(output: Static | PerToken, op_device: torch.device) -> None:
    x = torch.zeros(32, 32, dtype=BF16, device=op_device)
    with pytest.raises(InvalidArgument, match=r"gate_up: strides are .* call contiguous"):
        silu_mul_quantize(x.mT, output)
    with pytest.raises(InvalidArgument, match="gate_up: starts 16 bytes past a multiple of 32"):
        silu_mul_quantize(x.view(-1)[8:520].view(16, 32), output)


def test_devices() -> None:
    x = torch.zeros(2, 32)
    with pytest.raises(InvalidArgument, match=r"output\.global_scale: is on meta, must be"):
        silu_op._silu_mul_quantize._init_fn(x, SCALE.to("meta"), 1)
    with pytest.raises(NoKernelError, match="silu_mul_quantize_per_token: no w4a4 kernel for meta"):
        silu_op._silu_mul_quantize_per_token._init_fn(x.to("meta"), 1)
