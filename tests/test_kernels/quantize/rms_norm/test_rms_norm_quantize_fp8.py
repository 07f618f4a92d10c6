"""Norms that quantise to E4M3: the reference against vLLM, sm_90 against the reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from vllm import ir

from nvfp4_kernels import (
    InvalidArgument,
    NoKernelError,
    PerTokenFp8,
    StaticFp8,
    add_rms_norm,
    add_rms_norm_quantize,
    quantize,
    rms_norm_quantize,
)
from nvfp4_kernels.device.row_vectors.tile import VectorTile
from nvfp4_kernels.formats.output import Fp8Output
from nvfp4_kernels.norm.tile import MAX_K
from nvfp4_kernels.quantize.call import RmsNormQuantizeCall
from nvfp4_kernels.quantize.rms_norm import op as rms_norm_op
from nvfp4_kernels.quantize.rms_norm import reference
from nvfp4_kernels.quantize.rms_norm.arguments import Form
from nvfp4_kernels.quantize.rms_norm.kernels import KERNELS
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels import fp8_oracle
from tests.test_kernels.bits import bits, check_equal
from tests.test_kernels.compilation import check_compiled, check_op
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

EPS = 1e-5
SCALE = torch.tensor(0.0071)
OUTPUTS = [StaticFp8(SCALE), PerTokenFp8()]
EVERY_OUTPUT = pytest.mark.parametrize("output", OUTPUTS, ids=["static", "per token"])
SM90 = pytest.mark.arch("sm_90")
ONE_SCHEDULE = pytest.mark.schedules("random 1")


def random_weight(case: Case, dtype: torch.dtype | None = None) -> Tensor:
    return (1 + torch.randn(case.k) / 8).to(dtype or case.dtype)


# --- the formula ------------------------------------------------------------------------------


@EVERY_CASE
@pytest.mark.parametrize("weight_dtype", [None, FP32], ids=["own dtype", "fp32 weight"])
def test_reference(case: Case, weight_dtype: torch.dtype | None) -> None:
    x, residual, weight = case.random(), case.random(), random_weight(case, weight_dtype)
    norm = ir.ops.rms_norm.impls["native"].impl_fn(x, weight, EPS)
    scales = fp8_oracle.token_scales(norm)
    check_equal(
        [rms_norm_quantize(x, weight, EPS, StaticFp8(SCALE))], [fp8_oracle.rows(norm, SCALE)]
    )
    check_equal(
        rms_norm_quantize(x, weight, EPS, PerTokenFp8()), [fp8_oracle.rows(norm, scales), scales]
    )
    norm, total = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, EPS)
    scales = fp8_oracle.token_scales(norm)
    found = add_rms_norm_quantize(x, residual, weight, EPS, StaticFp8(SCALE))
    check_equal(found, (fp8_oracle.rows(norm, SCALE), total))
    found_per_token = add_rms_norm_quantize(x, residual, weight, EPS, PerTokenFp8())
    check_equal(found_per_token, (fp8_oracle.rows(norm, scales), scales, total))


# --- sm_90 ------------------------------------------------------------------------------------


def on(device: torch.device, output: Fp8Output) -> Fp8Output:
    return StaticFp8(output.scale.to(device)) if isinstance(output, StaticFp8) else output


def tuple_of(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else found


def check_exact(case: Case, device: torch.device, weight_dtype: torch.dtype | None = None) -> None:
    """Check both ops, each with both kinds of scale, on integers, bit for bit."""
    x, residual, weight = case.integers(), case.integers(), random_weight(case, weight_dtype)
    dx, dr, dw = (t.to(device) for t in (x, residual, weight))
    for output in OUTPUTS:
        check_equal(
            tuple_of(rms_norm_quantize(dx, dw, EPS, on(device, output))),
            reference.rms_norm_quantize(RmsNormQuantizeCall(x, None, weight, EPS, output)),
        )
        check_equal(
            add_rms_norm_quantize(dx, dr, dw, EPS, on(device, output)),
            reference.rms_norm_quantize(RmsNormQuantizeCall(x, residual, weight, EPS, output)),
        )


@SM90
@ONE_SCHEDULE
@EVERY_CASE
def test_integers_are_exact(case: Case, op_device: torch.device) -> None:
    check_exact(case, op_device)


@SM90
@EVERY_SCHEDULE
def test_every_schedule(op_device: torch.device) -> None:
    check_exact(Case(2, 16 * 131), op_device)


@SM90
@ONE_SCHEDULE
@EVERY_VECTOR_TILE
def test_tiles(tile: VectorTile, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use_vector_tile(monkeypatch, "quantize.rms_norm.sm90", tile)
    check_exact(Case(2, tile.elements - 80, batch=(2,), dtype=FP16), op_device, FP32)


@SM90
@ONE_SCHEDULE
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("k", [208, 2064, 4096])
def test_random_values_are_those_of_add_rms_norm(
    k: int, dtype: torch.dtype, op_device: torch.device
) -> None:
    """The bits of ``quantize`` of the 16-bit norm, whose sums have the same order.

    ``test_add_rms_norm`` bounds that norm; integers, above, are exact in any order.
    """
    case = Case(5, k, dtype=dtype)
    x, residual, weight = (
        t.to(op_device) for t in (case.random(), case.random(), random_weight(case))
    )
    norm, total = add_rms_norm(x, residual, weight, EPS)
    alone, _ = add_rms_norm(x, torch.zeros_like(x), weight, EPS)
    for output in (on(op_device, each) for each in OUTPUTS):
        found = add_rms_norm_quantize(x, residual, weight, EPS, output)
        check_equal(found, (*tuple_of(quantize(norm, output)), total))
        found = rms_norm_quantize(x, weight, EPS, output)
        check_equal(tuple_of(found), tuple_of(quantize(alone, output)))


@SM90
@ONE_SCHEDULE
def test_rows_of_zeros(op_device: torch.device) -> None:
    """Zeros stay zeros, by ``eps``, with a scale of 1 per token."""
    x, weight = torch.zeros(2, 80, dtype=BF16), torch.ones(80, dtype=BF16)
    stored, row_scale = rms_norm_quantize(x.to(op_device), weight.to(op_device), EPS, PerTokenFp8())
    assert not bits(stored).any()
    assert row_scale.tolist() == [1.0, 1.0]


@SM90
@ONE_SCHEDULE
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_not_finite(bad: float, op_device: torch.device) -> None:
    """A row with NaN or infinity is the reference's; other rows are unaffected."""
    x, weight = Case(5, 80).integers(), torch.ones(80, dtype=BF16)
    x[3, 20] = bad
    for output in OUTPUTS:
        given = (t.to(op_device) for t in (x, weight))
        found = tuple_of(rms_norm_quantize(*given, EPS, on(op_device, output)))
        call = RmsNormQuantizeCall(x, None, weight, EPS, output)
        check_equal(found, reference.rms_norm_quantize(call))
        assert bool((bits(found[0])[3, fp8_oracle.byte_of(20)] == fp8_oracle.NAN).all())


@SM90
@ONE_SCHEDULE
def test_spaced_rows(op_device: torch.device) -> None:
    """Strided input and residual; the new residual is contiguous."""
    wide, residual = Case(20, 192).integers(), Case(20, 96).integers()
    x, weight = wide[:, 40:136], random_weight(Case(1, 96))
    args = [wide.to(op_device)[:, 40:136], residual.to(op_device), weight.to(op_device)]
    found = add_rms_norm_quantize(*args, EPS, PerTokenFp8())
    call = RmsNormQuantizeCall(x, residual, weight, EPS, PerTokenFp8())
    check_equal(found, reference.rms_norm_quantize(call))
    assert found[-1].is_contiguous()
    args[:2] = args[1::-1]
    check_equal(add_rms_norm_quantize(*args, EPS, PerTokenFp8()), found)


@SM90
@EVERY_SCHEDULE
@pytest.mark.parametrize("over", ["x", "residual", "neither"])
def test_where_the_new_residual_goes(over: str, op_device: torch.device) -> None:
    """The new residual goes to a given tensor, which may be one of the addends."""
    case = Case(3, 1040)
    x, residual, weight = case.integers(), case.integers(), random_weight(case)
    output = StaticFp8(SCALE)
    call = RmsNormQuantizeCall(x, residual, weight, EPS, output)
    expected = reference.rms_norm_quantize(call)
    dx, dr = (t.to(op_device, copy=True) for t in (x, residual))
    out = {"x": dx, "residual": dr, "neither": torch.empty_like(dx)}[over]
    kernel = KERNELS[Form(adds=True, per_token=False, fp8=True)].select(dx.device, "w4a8")
    assert kernel.arch == "sm_90"
    at = weight.to(op_device), EPS, on(op_device, output)
    found = kernel.load()(RmsNormQuantizeCall(dx, dr, *at, out=out))
    check_equal(found, expected)
    assert found[-1] is out
    for name, given, before in (("x", dx, x), ("residual", dr, residual)):
        assert torch.equal(given.cpu(), before) == (name != over)


@SM90
@EVERY_SCHEDULE
def test_dependent_launches(op_device: torch.device) -> None:
    """A second launch may start before the first has ended, and reads the new residual."""
    case = Case(3, 64)
    x, residual, weight = case.integers(), case.integers(), random_weight(case)
    args = [t.to(op_device) for t in (x, residual, weight)]
    *_, out = add_rms_norm_quantize(*args, EPS, PerTokenFp8())
    found = rms_norm_quantize(out, args[-1], EPS, PerTokenFp8())
    call = RmsNormQuantizeCall(x + residual, None, weight, EPS, PerTokenFp8())
    check_equal(found, reference.rms_norm_quantize(call))


def test_each_byte_once() -> None:
    """Inputs are read from HBM once; results are written once."""
    with devices.emulated_ops(EAGER, "sm_90") as gpu:
        case = Case(5, 592)
        x, residual, weight = case.random(), case.random(), random_weight(case)
        written = add_rms_norm_quantize(x, residual, weight, EPS, PerTokenFp8())
        counted = gpu.launches[-1].counters.nbytes
        once = x.nbytes + residual.nbytes + weight.nbytes
        assert counted["HBM read, each byte once"] == once
        assert counted["global write"] == sum(t.nbytes for t in written)


@SM90
@ONE_SCHEDULE
@EVERY_OUTPUT
def test_batch_invariant(output: Fp8Output, op_device: torch.device) -> None:
    """A row's bits are the same in a batch and alone, with the kernel that says so."""
    case = Case(9, 2064)
    x, weight = case.random().to(op_device), random_weight(case).to(op_device)
    form = Form(adds=False, per_token=isinstance(output, PerTokenFp8), fp8=True)
    kernel = KERNELS[form].select(x.device, "w4a8", batch_invariant=True).load()
    output = on(op_device, output)
    together = kernel(RmsNormQuantizeCall(x, None, weight, EPS, output))
    for row in range(case.m):
        alone = kernel(RmsNormQuantizeCall(x[row : row + 1], None, weight, EPS, output))
        check_equal(alone, [each[row : row + 1] for each in together])


# --- compilation and errors -------------------------------------------------------------------


@pytest.mark.processes
def test_opcheck() -> None:
    case = CASES["batch of batches"]
    x, weight, ops = case.random(), random_weight(case), torch.ops.nvfp4
    check_op(ops.rms_norm_quantize_fp8.default, (x, weight, EPS, SCALE))
    check_op(ops.rms_norm_quantize_fp8_per_token.default, (x, weight, EPS))
    check_op(ops.add_rms_norm_quantize_fp8.default, (x, x.clone(), weight, EPS, SCALE))
    check_op(ops.add_rms_norm_quantize_fp8_per_token.default, (x, x.clone(), weight, EPS))


@EVERY_OUTPUT
def test_compiled(output: Fp8Output) -> None:
    weight = random_weight(CASES["ragged"])

    def layer(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        *quantized, total = add_rms_norm_quantize(x, residual, weight, 1e-5, output)
        again = rms_norm_quantize(total, weight, 1e-5, output)
        return (*quantized, total, *([again] if isinstance(again, Tensor) else again))

    inputs = [replace(CASES["ragged"], m=m).random() for m in (5, 40, 128)]
    check_compiled(layer, [((x, x.clone()), {}) for x in inputs], graphs=1)


def test_devices() -> None:
    x, weight = torch.zeros(2, 32, dtype=BF16), torch.ones(32, dtype=BF16)
    meta = x.to("meta"), weight.to("meta")
    static, per_token = (
        rms_norm_op._OPS[Form(adds=False, per_token=p, fp8=True)] for p in (False, True)
    )
    with pytest.raises(InvalidArgument, match="weight: is on meta, must be on cpu as x is"):
        static._init_fn(x, meta[1], EPS, SCALE)
    with pytest.raises(InvalidArgument, match=r"output\.scale: is on meta, must be"):
        static._init_fn(x, weight, EPS, SCALE.to("meta"))
    with pytest.raises(NoKernelError, match="rms_norm_quantize_per_token: no w4a8 kernel for meta"):
        per_token._init_fn(*meta, EPS)


@SM90
@ONE_SCHEDULE
def test_refused_layout(op_device: torch.device) -> None:
    x = torch.zeros(32, 32, dtype=BF16, device=op_device)
    weight = torch.ones(64, dtype=BF16, device=op_device)
    late = x.view(-1)[4:516].view(16, 32)
    long = torch.zeros(1, MAX_K + 16, dtype=BF16, device=op_device)
    for arguments, message in (
        ((x.mT, x, weight[:32]), "x: strides are .* call contiguous"),
        ((x, x.mT, weight[:32]), "residual: strides are .* call contiguous"),
        ((late, x[:16], weight[:32]), "x: starts 8 bytes past a multiple of 16"),
        ((x[:16], late, weight[:32]), "residual: starts 8 bytes past a multiple of 16"),
        ((x, x, weight[::2]), "weight: stride is 2, must be 1; call contiguous"),
        ((x, x, weight[4:36]), "weight: starts 8 bytes past a multiple of 16.*clone"),
        ((long, long, long[0]), "x: K is 24592, must be at most 24576 on sm_90; normalise longer"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            add_rms_norm_quantize(*arguments, EPS, PerTokenFp8())
