"""``silu_mul_quantize`` to E4M3: the reference against vLLM, sm_90 against the reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.activation import SiluAndMul

from nvfp4_kernels import InvalidArgument, NoKernelError, PerTokenFp8, StaticFp8, silu_mul_quantize
from nvfp4_kernels.device.row_vectors.tile import VectorTile, longest_row
from nvfp4_kernels.formats.fp8_rows import quantize_fp8
from nvfp4_kernels.formats.output import Fp8Output
from nvfp4_kernels.quantize import reference as plain
from nvfp4_kernels.quantize.call import QuantizeCall, SiluMulQuantizeCall
from nvfp4_kernels.quantize.silu_mul import op as silu_op
from nvfp4_kernels.quantize.silu_mul import reference
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels import fp8_oracle
from tests.test_kernels.bits import bits, check_equal
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.quantize.silu_mul.test_silu_mul_quantize import bounds, grid_input
from tests.test_kernels.rowwise.row_cases import (
    BF16,
    CASES,
    EVERY_CASE,
    EVERY_SCHEDULE,
    EVERY_VECTOR_TILE,
    FP16,
    FP32,
    Case,
    use_vector_tile,
)

SCALE = torch.tensor(0.0173)
OUTPUTS = [StaticFp8(SCALE), PerTokenFp8()]
EVERY_OUTPUT = pytest.mark.parametrize("output", OUTPUTS, ids=["static", "per token"])
SM90 = pytest.mark.arch("sm_90")
ONE_SCHEDULE = pytest.mark.schedules("random 1")


def random_input(case: Case) -> Tensor:
    return 4 * replace(case, k=2 * case.k).random()


# --- the formula ------------------------------------------------------------------------------


@EVERY_CASE
def test_reference(case: Case) -> None:
    x = random_input(case)
    product = SiluAndMul.forward_native(x)
    check_equal([silu_mul_quantize(x, StaticFp8(SCALE))], [fp8_oracle.rows(product, SCALE)])
    scales = fp8_oracle.token_scales(product)
    check_equal(silu_mul_quantize(x, PerTokenFp8()), [fp8_oracle.rows(product, scales), scales])


# --- sm_90 ------------------------------------------------------------------------------------


def run(x: Tensor, output: Fp8Output, device: torch.device) -> tuple[Tensor, ...]:
    if isinstance(output, StaticFp8):
        return (silu_mul_quantize(x.to(device), StaticFp8(output.scale.to(device))),)
    return silu_mul_quantize(x.to(device), output)


def check_exact(x: Tensor, device: torch.device) -> None:
    for output in OUTPUTS:
        expected = reference.silu_mul_quantize(SiluMulQuantizeCall(x, output))
        check_equal(run(x, output, device), expected)


@SM90
@ONE_SCHEDULE
@EVERY_CASE
def test_grid_values_are_exact(case: Case, op_device: torch.device) -> None:
    check_exact(grid_input(case), op_device)


@SM90
@EVERY_SCHEDULE
def test_every_schedule(op_device: torch.device) -> None:
    check_exact(grid_input(Case(3, 16 * 37)), op_device)


@SM90
@ONE_SCHEDULE
@EVERY_VECTOR_TILE
def test_tiles(tile: VectorTile, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use_vector_tile(monkeypatch, "quantize.silu_mul.sm90", tile)
    check_exact(grid_input(Case(2, tile.elements - 80, batch=(2,))), op_device)


@SM90
@ONE_SCHEDULE
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_random_values(dtype: torch.dtype, op_device: torch.device) -> None:
    """Rounding is monotone: where both bounds give the same byte, the kernel must as well."""
    x = random_input(Case(37, 400, dtype=dtype))
    ends = [plain.quantize(QuantizeCall(end, StaticFp8(SCALE)))[0] for end in bounds(x)]
    settled = bits(ends[0]) == bits(ends[1])
    assert settled.float().mean() > 0.99
    (found,) = run(x, StaticFp8(SCALE), op_device)
    assert torch.equal(bits(found)[settled], bits(ends[0])[settled])
    found, row_scale = run(x, PerTokenFp8(), op_device)
    low, high = (fp8_oracle.token_scales(end) for end in bounds(x))
    assert bool(((low <= row_scale.cpu()) & (row_scale.cpu() <= high)).all())
    again = (quantize_fp8(end, row_scale.cpu()) for end in bounds(x))
    first, second = (bits(each) for each in again)
    assert torch.equal(bits(found)[first == second], first[first == second])


@SM90
@ONE_SCHEDULE
def test_not_finite(op_device: torch.device) -> None:
    gate_up = torch.ones(5, 64, dtype=BF16)
    gate_up[0, 3], gate_up[1, 40], gate_up[2, 20], gate_up[3, 21] = (
        torch.nan, torch.nan, torch.inf, -torch.inf,
    )  # fmt: skip
    (found,) = run(gate_up, StaticFp8(SCALE), op_device)
    (expected,) = reference.silu_mul_quantize(SiluMulQuantizeCall(gate_up, StaticFp8(SCALE)))
    assert bool(expected.float().isnan().any())
    check_equal([found], [expected])


@SM90
@ONE_SCHEDULE
def test_spaced_rows(op_device: torch.device) -> None:
    wide = grid_input(Case(20, 96))
    found = silu_mul_quantize(wide.to(op_device)[:, 40:168], PerTokenFp8())
    call = SiluMulQuantizeCall(wide[:, 40:168], PerTokenFp8())
    check_equal(found, reference.silu_mul_quantize(call))


@SM90
@ONE_SCHEDULE
def test_dependent_launches(op_device: torch.device) -> None:
    """A launch may start before its predecessor has ended, and reads the predecessor's result."""
    _, row_scale = run(grid_input(Case(32, 32)), PerTokenFp8(), op_device)
    gate_up = row_scale.view(1, 32)
    found = silu_mul_quantize(gate_up, PerTokenFp8())
    check_equal(found, silu_mul_quantize(gate_up.clone(), PerTokenFp8()))


def test_each_byte_once() -> None:
    with devices.emulated_ops(EAGER, "sm_90") as gpu:
        x = random_input(Case(131, 80))
        written = silu_mul_quantize(x, PerTokenFp8())
        counted = gpu.launches[-1].counters.nbytes
        assert counted["HBM read, each byte once"] == x.nbytes
        assert counted["global write"] == sum(t.nbytes for t in written)


# --- compilation and errors -------------------------------------------------------------------


@pytest.mark.processes
def test_opcheck() -> None:
    x = random_input(CASES["batch of batches"])
    check_op(torch.ops.nvfp4.silu_mul_quantize_fp8.default, (x, SCALE))
    check_op(torch.ops.nvfp4.silu_mul_quantize_fp8_per_token.default, (x,))


@EVERY_OUTPUT
def test_compiled(output: Fp8Output) -> None:
    inputs = [random_input(replace(CASES["ragged"], m=m)) for m in (5, 40, 128)]
    check_compiled(silu_mul_quantize, [((x, output), {}) for x in inputs], graphs=1)


@EVERY_OUTPUT
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
def test_refused_input(output: Fp8Output, x: Tensor, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        silu_mul_quantize(x, output)


def test_devices() -> None:
    x = torch.zeros(2, 32)
    with pytest.raises(InvalidArgument, match=r"output\.scale: is on meta, must be"):
        silu_op._silu_mul_quantize_fp8._init_fn(x, SCALE.to("meta"))
    with pytest.raises(NoKernelError, match="silu_mul_quantize_per_token: no w4a8 kernel for meta"):
        silu_op._silu_mul_quantize_fp8_per_token._init_fn(x.to("meta"))


@SM90
@ONE_SCHEDULE
@EVERY_OUTPUT
def test_refused_layout(output: Fp8Output, op_device: torch.device) -> None:
    x = torch.zeros(32, 32, dtype=BF16, device=op_device)
    with pytest.raises(InvalidArgument, match=r"gate_up: strides are .* call contiguous"):
        run(x.mT, output, op_device)
    with pytest.raises(InvalidArgument, match="gate_up: starts 8 bytes past a multiple of 16"):
        run(x.view(-1)[4:516].view(16, 32), output, op_device)


@SM90
@ONE_SCHEDULE
def test_refused_length(op_device: torch.device) -> None:
    x = torch.zeros(1, 2 * longest_row(8) + 32, dtype=FP32, device=op_device)
    with pytest.raises(
        InvalidArgument, match="x: K is 24592, must be at most 24576; quantise long"
    ):
        silu_mul_quantize(x, PerTokenFp8())
