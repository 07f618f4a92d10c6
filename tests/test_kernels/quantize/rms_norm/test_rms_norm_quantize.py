"""Norms that quantise: the reference against vLLM, sm_100 against the reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import ir

from nvfp4_kernels import (
    InvalidArgument,
    NoKernelError,
    PerToken,
    PerTokenFp8,
    Static,
    StaticFp8,
    add_rms_norm_quantize,
    rms_norm_quantize,
)
from nvfp4_kernels.device.rowwise.tile import RowTile
from nvfp4_kernels.quantize import reference as plain
from nvfp4_kernels.quantize.call import QuantizeCall, RmsNormQuantizeCall
from nvfp4_kernels.quantize.rms_norm import op as rms_norm_op
from nvfp4_kernels.quantize.rms_norm import reference
from nvfp4_kernels.quantize.rms_norm.arguments import Form
from nvfp4_kernels.quantize.rms_norm.kernels import KERNELS
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

EPS = 1e-5
SCALE = torch.tensor(0.002)
SM100 = pytest.mark.arch("sm_100")
ONE_SCHEDULE = pytest.mark.schedules("random 1")


def random_weight(case: Case, dtype: torch.dtype | None = None) -> Tensor:
    return (1 + torch.randn(case.k) / 8).to(dtype or case.dtype)


# --- the formula ------------------------------------------------------------------------------


@EVERY_CASE
@pytest.mark.parametrize("weight_dtype", [None, FP32], ids=["own dtype", "fp32 weight"])
def test_reference(case: Case, weight_dtype: torch.dtype | None) -> None:
    x, residual, weight = case.random(), case.random(), random_weight(case, weight_dtype)
    norm = ir.ops.rms_norm.impls["native"].impl_fn(x, weight, EPS)
    check_equal(
        rms_norm_quantize(x, weight, EPS, Static(SCALE)),
        plain.quantize(QuantizeCall(norm, Static(SCALE))),
    )
    check_equal(
        rms_norm_quantize(x, weight, EPS, PerToken()),
        plain.quantize(QuantizeCall(norm, PerToken())),
    )
    norm, total = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, EPS)
    found = add_rms_norm_quantize(x, residual, weight, EPS, Static(SCALE))
    check_equal(found, (*plain.quantize(QuantizeCall(norm, Static(SCALE))), total))
    found_per_token = add_rms_norm_quantize(x, residual, weight, EPS, PerToken())
    check_equal(found_per_token, (*plain.quantize(QuantizeCall(norm, PerToken())), total))


# --- sm_100 -----------------------------------------------------------------------------------


def check_exact(
    case: Case,
    device: torch.device,
    weight_dtype: torch.dtype | None = None,
    terms: int = 1,
) -> None:
    """Check both ops, each with both kinds of global scale, on integers, bit for bit."""
    x, residual, weight = case.integers(), case.integers(), random_weight(case, weight_dtype)
    dx, dr, dw, ds = (t.to(device) for t in (x, residual, weight, SCALE))
    check_equal(
        rms_norm_quantize(dx, dw, EPS, Static(ds, terms)),
        reference.rms_norm_quantize(
            RmsNormQuantizeCall(x, None, weight, EPS, Static(SCALE, terms))
        ),
    )
    check_equal(
        rms_norm_quantize(dx, dw, EPS, PerToken(terms)),
        reference.rms_norm_quantize(RmsNormQuantizeCall(x, None, weight, EPS, PerToken(terms))),
    )
    check_equal(
        add_rms_norm_quantize(dx, dr, dw, EPS, Static(ds, terms)),
        reference.rms_norm_quantize(
            RmsNormQuantizeCall(x, residual, weight, EPS, Static(SCALE, terms))
        ),
    )
    check_equal(
        add_rms_norm_quantize(dx, dr, dw, EPS, PerToken(terms)),
        reference.rms_norm_quantize(RmsNormQuantizeCall(x, residual, weight, EPS, PerToken(terms))),
    )


@SM100
@ONE_SCHEDULE
@EVERY_CASE
def test_integers_are_exact(case: Case, op_device: torch.device) -> None:
    check_exact(case, op_device)


@SM100
@EVERY_SCHEDULE
def test_every_schedule(op_device: torch.device) -> None:
    check_exact(Case(5, 80), op_device)


@SM100
@ONE_SCHEDULE
@EVERY_TILE
def test_tiles(tile: RowTile, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tile(monkeypatch, "quantize.rms_norm", tile)
    check_exact(Case(3, 16 * 37, batch=(2,), dtype=FP16), op_device, FP32)


@SM100
@ONE_SCHEDULE
@pytest.mark.parametrize("terms", [2, 3, 4])
@pytest.mark.parametrize("m", [3, 35])
def test_terms(m: int, terms: int, op_device: torch.device) -> None:
    check_exact(Case(m, 16 * 37, batch=(2,)), op_device, terms=terms)


@SM100
@ONE_SCHEDULE
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_random_values(dtype: torch.dtype, op_device: torch.device) -> None:
    """Every row is exact for some reciprocal root within float32's error of the true root.

    A sum of n positive products, fused, is off by less than n roundings of 2⁻²⁴; here a thread adds
    16, lanes and warps another 10. The mean and the addition of eps round once each, the root
    halves that and rounds, the reciprocal rounds: 26/2 + 3 roundings, of at most an ulp each.
    """
    case = Case(6, 496, dtype=dtype)
    x, residual, weight = case.random(), case.random(), random_weight(case)
    args = (t.to(op_device) for t in (x, residual, weight))
    data, scales, row_scale, out = add_rms_norm_quantize(*args, EPS, PerToken())
    total = x.float() + residual.float()
    check_equal([out], [total.to(dtype)])
    exact = (total.double().square().mean(-1) + EPS).rsqrt().float()
    ulp = exact.nextafter(torch.tensor(torch.inf)) - exact
    for row in range(case.m):
        near = exact[row] + torch.arange(-16, 17) * ulp[row]
        normalised = (total[row] * near.unsqueeze(-1)).to(dtype) * weight
        codes, _, possible = plain.quantize(QuantizeCall(normalised, PerToken()))
        same = (codes == data[row].cpu()).all(-1) & (possible == row_scale[row].cpu())
        assert same.any(), f"row {row}"
    # Scales follow from the same values as the codes, which are checked above.
    assert bits(scales).any()


@SM100
@ONE_SCHEDULE
def test_not_finite(op_device: torch.device) -> None:
    """A row with NaN becomes NaN throughout; other rows are unaffected."""
    x = Case(5, 64).integers()
    x[3, 20] = torch.nan
    weight = torch.ones(64, dtype=BF16)
    given = (t.to(op_device) for t in (x, weight))
    found = rms_norm_quantize(*given, EPS, Static(SCALE.to(op_device)))
    expected = reference.rms_norm_quantize(RmsNormQuantizeCall(x, None, weight, EPS, Static(SCALE)))
    assert bool(expected[1].float().isnan().any())
    scales = [s.cpu().float() for s in (found[1], expected[1])]
    torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)
    others = torch.arange(5) != 3
    assert torch.equal(found[0].cpu()[others], expected[0][others])


@SM100
@ONE_SCHEDULE
def test_spaced_rows(op_device: torch.device) -> None:
    """Strided input and residual; the new residual is contiguous."""
    wide, residual = Case(20, 192).integers(), Case(20, 96).integers()
    x, weight = wide[:, 32:128], random_weight(Case(1, 96))
    args = [wide.to(op_device)[:, 32:128], residual.to(op_device), weight.to(op_device)]
    found = add_rms_norm_quantize(*args, EPS, PerToken())
    check_equal(
        found,
        reference.rms_norm_quantize(RmsNormQuantizeCall(x, residual, weight, EPS, PerToken())),
    )
    assert found[-1].is_contiguous()
    args[:2] = args[1::-1]
    check_equal(add_rms_norm_quantize(*args, EPS, PerToken()), found)


@SM100
@EVERY_SCHEDULE
@pytest.mark.parametrize("over", ["x", "residual", "neither"])
def test_where_the_new_residual_goes(over: str, op_device: torch.device) -> None:
    """The new residual goes to a given tensor, which may be one of the addends."""
    case = Case(5, 1040)
    x, residual, weight = case.integers(), case.integers(), random_weight(case)
    expected = reference.rms_norm_quantize(
        RmsNormQuantizeCall(x, residual, weight, EPS, Static(SCALE))
    )
    dx, dr = (t.to(op_device, copy=True) for t in (x, residual))
    out = {"x": dx, "residual": dr, "neither": torch.empty_like(dx)}[over]
    kernel = KERNELS[Form(adds=True, per_token=False)].select(dx.device, "w4a4")
    assert kernel.arch == "sm_100"
    at = weight.to(op_device), EPS, Static(SCALE.to(op_device))
    found = kernel.load()(RmsNormQuantizeCall(dx, dr, *at, out=out))
    check_equal(found, expected)
    assert found[-1] is out
    for name, given, before in (("x", dx, x), ("residual", dr, residual)):
        assert torch.equal(given.cpu(), before) == (name != over)
    cx, cr = x.clone(), residual.clone()
    out = {"x": cx, "residual": cr, "neither": torch.empty_like(cx)}[over]
    found = reference.rms_norm_quantize(
        RmsNormQuantizeCall(cx, cr, weight, EPS, Static(SCALE), out)
    )
    check_equal(found, expected)
    assert found[-1] is out


@SM100
@EVERY_SCHEDULE
def test_dependent_launches(op_device: torch.device) -> None:
    """A second launch may start before the first has ended, and reads the new residual."""
    case = Case(3, 64)
    x, residual, weight = case.integers(), case.integers(), random_weight(case)
    args = [t.to(op_device) for t in (x, residual, weight)]
    *_, out = add_rms_norm_quantize(*args, EPS, PerToken())
    found = rms_norm_quantize(out, args[-1], EPS, PerToken())
    check_equal(
        found,
        reference.rms_norm_quantize(
            RmsNormQuantizeCall(x + residual, None, weight, EPS, PerToken())
        ),
    )


def test_each_byte_once() -> None:
    """Inputs are read once; each CTA reads the weight, once from HBM and then from cache."""
    with devices.emulated_ops(EAGER) as gpu:
        case = Case(19, 592)
        x, residual, weight = case.random(), case.random(), random_weight(case)
        written = add_rms_norm_quantize(x, residual, weight, EPS, PerToken())
        counted = gpu.launches[-1].counters.nbytes
        assert counted["global read"] == x.nbytes + residual.nbytes + case.m * weight.nbytes
        once = x.nbytes + residual.nbytes + weight.nbytes
        assert counted["HBM read, each byte once"] == once
        assert counted["global write"] == sum(t.nbytes for t in written)


# --- compilation and errors -------------------------------------------------------------------


@pytest.mark.processes
def test_opcheck() -> None:
    case = CASES["batch of batches"]
    x, weight = case.random(), random_weight(case)
    ops = torch.ops.nvfp4
    for terms in (1, 2):
        check_op(ops.rms_norm_quantize.default, (x, weight, EPS, SCALE, terms))
        check_op(ops.rms_norm_quantize_per_token.default, (x, weight, EPS, terms))
        check_op(ops.add_rms_norm_quantize.default, (x, x.clone(), weight, EPS, SCALE, terms))
        check_op(ops.add_rms_norm_quantize_per_token.default, (x, x.clone(), weight, EPS, terms))


def test_compiled() -> None:
    weight = random_weight(CASES["ragged"])

    def layer(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return add_rms_norm_quantize(x, residual, weight, 1e-5, PerToken())

    inputs = [replace(CASES["ragged"], m=m).random() for m in (5, 40, 128)]
    check_compiled(layer, [((x, x.clone()), {}) for x in inputs], graphs=1)


X, WEIGHT = torch.zeros(2, 32, dtype=BF16), torch.ones(32, dtype=BF16)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(2, 40)}, "x: K is 40, must be a multiple of 16; pad K with zeros"),
        ({"x": torch.zeros(32)}, r"x: shape is \(32,\), must have at least 2 dimensions"),
        ({"x": torch.zeros(2, 0)}, "x: K is 0, must be positive"),
        ({"x": X.double()}, "x: dtype is float64, must be bfloat16"),
        ({"weight": WEIGHT.half()}, "weight: dtype is float16, must be bfloat16, float32"),
        ({"weight": WEIGHT[:16]}, r"weight: shape is \(16,\), must be \(32,\); one factor per col"),
        ({"eps": -1e-5}, "eps: is -1e-05, must be 0 or more and finite"),
        ({"eps": float("nan")}, "eps: is nan, must be 0 or more and finite"),
        ({"residual": None}, "residual: is NoneType, must be a tensor of bfloat16"),
        ({"residual": X.float()}, "residual: dtype is float32, must be bfloat16"),
        ({"residual": X[:1]}, r"residual: shape is \(1, 32\), must be \(2, 32\)"),
        ({"output": Static(torch.ones(2))}, r"output.global_scale: shape is \(2,\).*: PerToken"),
        ({"output": Static(SCALE.double())}, "output.global_scale: dtype is float64, must be"),
        ({"output": Static(SCALE, 5)}, "output.terms: is 5, must be 1 to 4"),
        ({"output": StaticFp8(torch.ones(2))}, r"output.scale: shape is \(2,\).*: PerTokenFp8"),
        ({"output": StaticFp8(SCALE.double())}, "output.scale: dtype is float64, must be"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else "",
)
def test_refused_arguments(changed: dict[str, object], message: str) -> None:
    for output in (Static(SCALE), PerToken(), StaticFp8(SCALE), PerTokenFp8()):
        args: dict[str, Any] = {"x": X, "weight": WEIGHT, "eps": EPS, "output": output} | changed
        with pytest.raises(InvalidArgument, match=message):
            add_rms_norm_quantize(**{"residual": X} | args)
        if "residual" not in changed:
            with pytest.raises(InvalidArgument, match=message):
                rms_norm_quantize(**args)


@SM100
@ONE_SCHEDULE
def test_refused_layout(op_device: torch.device) -> None:
    x = torch.zeros(32, 32, dtype=BF16, device=op_device)
    weight = torch.ones(64, dtype=BF16, device=op_device)
    late = x.view(-1)[8:520].view(16, 32)
    for arguments, message in (
        ((x.mT, x, weight[:32]), "x: strides are .* call contiguous"),
        ((x, x.mT, weight[:32]), "residual: strides are .* call contiguous"),
        ((late, x[:16], weight[:32]), "x: starts 16 bytes past a multiple of 32"),
        ((x[:16], late, weight[:32]), "residual: starts 16 bytes past a multiple of 32"),
        ((x, x, weight[::2]), "weight: stride is 2, must be 1; call contiguous"),
        ((x, x, weight[8:40]), "weight: starts 16 bytes past a multiple of 32.*clone"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            add_rms_norm_quantize(*arguments, EPS, PerToken())


def test_devices() -> None:
    meta = X.to("meta")
    static, per_token = (rms_norm_op._OPS[Form(adds=False, per_token=p)] for p in (False, True))
    with pytest.raises(InvalidArgument, match="weight: is on meta, must be on cpu as x is"):
        static._init_fn(X, WEIGHT.to("meta"), EPS, SCALE, 1)
    with pytest.raises(InvalidArgument, match=r"output\.global_scale: is on meta, must be"):
        static._init_fn(X, WEIGHT, EPS, SCALE.to("meta"), 1)
    with pytest.raises(NoKernelError, match="rms_norm_quantize_per_token: no w4a4 kernel for meta"):
        per_token._init_fn(meta, WEIGHT.to("meta"), EPS, 1)
