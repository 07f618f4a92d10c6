"""``add_rms_norm``: the reference against vLLM, sm_90 against the reference."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from vllm import ir

from nvfp4_kernels import InvalidArgument, NoKernelError, add_rms_norm
from nvfp4_kernels.device.row_vectors.tile import VectorTile
from nvfp4_kernels.norm import op as norm_op
from nvfp4_kernels.norm import reference
from nvfp4_kernels.norm.call import AddRmsNormCall
from nvfp4_kernels.norm.choose import choose_config
from nvfp4_kernels.norm.tile import MAX_K
from tests import devices
from tests.emulator import EAGER, STANDARD
from tests.test_kernels.bits import check_equal
from tests.test_kernels.compilation import check_compiled, check_op

EPS = 1e-5
BF16, FP16 = torch.bfloat16, torch.float16
SM90 = pytest.mark.arch("sm_90")
ONE_SCHEDULE = pytest.mark.schedules("random 1")
EVERY_SCHEDULE = pytest.mark.schedules(*(schedule.name for schedule in STANDARD))


@dataclass(frozen=True)
class Case:
    m: int
    k: int
    dtype: torch.dtype = BF16

    def random(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, residual and weight of random values."""
        rows = [torch.randn(self.m, self.k).to(self.dtype) for _ in range(2)]
        return *rows, (1 + torch.randn(self.k) / 8).to(self.dtype)

    def integers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return x and residual within ±8, so that float32 sums of squares are exact."""
        rows = [torch.randint(-8, 9, (self.m, self.k)).to(self.dtype) for _ in range(2)]
        return *rows, self.random()[-1]


CASES = {
    "one vector": Case(1, 8),
    "no rows": Case(0, 64),
    "idle lanes": Case(3, 40),
    "idle warp's end": Case(5, 8 * 37, FP16),
    "one step": Case(2, 2048),
    "ragged last step": Case(2, 2056),
    "Llama 3 8B hidden": Case(3, 4096),
    "DeepSeek V3 hidden": Case(1, 7168, FP16),
    "Llama 3 70B hidden": Case(2, 8192),
    "longest": Case(1, MAX_K),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def run(arguments: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    return add_rms_norm(*(each.to(device) for each in arguments), EPS)


# --- the formula ------------------------------------------------------------------------------


@EVERY_CASE
def test_reference(case: Case) -> None:
    given = case.random()
    expected = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(*given, EPS)
    check_equal(add_rms_norm(*given, EPS), expected)


# --- sm_90 ------------------------------------------------------------------------------------


@SM90
@ONE_SCHEDULE
@EVERY_CASE
def test_integers_are_exact(case: Case, op_device: torch.device) -> None:
    given = case.integers()
    check_equal(run(given, op_device), reference.add_rms_norm(AddRmsNormCall(*given, EPS)))


@SM90
@EVERY_SCHEDULE
def test_every_schedule(op_device: torch.device) -> None:
    given = Case(3, 8 * 75).integers()
    check_equal(run(given, op_device), reference.add_rms_norm(AddRmsNormCall(*given, EPS)))


@SM90
@ONE_SCHEDULE
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_random_values(dtype: torch.dtype, op_device: torch.device) -> None:
    """Every row is exact for some reciprocal root within float32's error of the true root.

    A sum of n positive products, fused, is off by less than n roundings of 2⁻²⁴; here a thread adds
    8 products in each of 2 steps and then both sums; lanes and warps add another 10. The mean and
    the addition of eps round once each, the root halves that and rounds, the reciprocal rounds:
    29/2 + 2 roundings, of at most an ulp each.
    """
    given = Case(6, 2056, dtype).random()
    found, total = run(given, op_device)
    exact_total = given[0].float() + given[1].float()
    check_equal([total], [exact_total.to(dtype)])
    exact = (exact_total.double().square().mean(-1) + EPS).rsqrt().float()
    ulp = exact.nextafter(torch.tensor(torch.inf)) - exact
    for row in range(6):
        near = exact[row] + torch.arange(-17, 18) * ulp[row]
        possible = (exact_total[row] * near.unsqueeze(-1)).to(dtype) * given[2]
        assert (possible == found[row].cpu()).all(-1).any(), f"row {row}"


@SM90
@ONE_SCHEDULE
def test_not_finite(op_device: torch.device) -> None:
    """A row with NaN becomes NaN throughout; other rows are unaffected."""
    given = Case(5, 64).integers()
    given[0][3, 20] = torch.nan
    found, _ = run(given, op_device)
    expected, _ = reference.add_rms_norm(AddRmsNormCall(*given, EPS))
    assert bool(found[3].isnan().all())
    others = torch.arange(5) != 3
    assert torch.equal(found[others].cpu(), expected[others])


@SM90
@ONE_SCHEDULE
def test_spaced_rows(op_device: torch.device) -> None:
    """Strided input and residual; results are contiguous."""
    wide, residual, weight = Case(20, 192).integers()
    given = wide[:, 32:128], residual[:, :96].contiguous(), weight[:96].contiguous()
    at = [wide.to(op_device)[:, 32:128], *(each.to(op_device) for each in given[1:])]
    found = add_rms_norm(*at, EPS)
    check_equal(found, reference.add_rms_norm(AddRmsNormCall(*given, EPS)))
    assert all(each.is_contiguous() for each in found)
    check_equal(add_rms_norm(at[1], at[0], at[2], EPS), found)


@SM90
@EVERY_SCHEDULE
def test_dependent_launches(op_device: torch.device) -> None:
    """A second launch may start before the first has ended, and reads both of its results."""
    x, residual, weight = Case(3, 600).integers()
    at = [each.to(op_device) for each in (x, residual, weight)]
    found = add_rms_norm(*add_rms_norm(*at, EPS), at[-1], EPS)
    first = reference.add_rms_norm(AddRmsNormCall(x, residual, weight, EPS))
    expected = reference.add_rms_norm(AddRmsNormCall(*first, weight, EPS))
    # The second sum of squares is not exact: a value may round the other way.
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=2**-7, atol=0)


def test_each_byte_once() -> None:
    """Inputs are read once; each CTA reads the weight, once from HBM and then from cache."""
    with devices.emulated_ops(EAGER, "sm_90") as gpu:
        x, residual, weight = Case(3, 4096).random()
        written = add_rms_norm(x, residual, weight, EPS)
        counted = gpu.launches[-1].counters.nbytes
        assert counted["global read"] == x.nbytes + residual.nbytes + 3 * weight.nbytes
        assert counted["global write"] == sum(each.nbytes for each in written)


@pytest.mark.parametrize("k", [8, 2048, 2056, 4096, 8192, 14336, MAX_K])
def test_config_covers_rows(k: int) -> None:
    """Every element has a thread, and every warp has elements in some step."""
    tile = choose_config(k)
    assert tile.threads * tile.steps * 8 >= k
    assert (tile.threads - 32) * tile.steps * 8 < k


# --- mutants ----------------------------------------------------------------------------------


@SM90
@ONE_SCHEDULE
def test_a_tile_too_small_is_noticed(
    op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that leaves elements out fails the exact tests."""
    from nvfp4_kernels.norm import sm90

    monkeypatch.setattr(sm90, "choose_config", lambda k: VectorTile(32, 1))
    given = Case(2, 512).integers()
    with pytest.raises(AssertionError):
        check_equal(run(given, op_device), reference.add_rms_norm(AddRmsNormCall(*given, EPS)))


# --- compilation and errors -------------------------------------------------------------------


def test_opcheck() -> None:
    check_op(torch.ops.nvfp4.add_rms_norm.default, (*CASES["idle lanes"].random(), EPS))


def test_compiled() -> None:
    weight = Case(1, 64).random()[-1]

    def layer(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, 1e-5)

    calls = [(Case(m, 64).random()[:2], {}) for m in (5, 40, 128)]
    check_compiled(layer, calls, graphs=1)


X, WEIGHT = torch.zeros(2, 32, dtype=BF16), torch.ones(32, dtype=BF16)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": X.float()}, "x: dtype is float32, must be bfloat16, float16"),
        ({"x": X[0]}, r"x: shape is \(32,\), must be \(M, K\) with K above 0; view it as rows"),
        ({"x": X[:, :0]}, r"x: shape is \(2, 0\), must be \(M, K\) with K above 0"),
        ({"residual": X.half()}, "residual: dtype is float16, must be bfloat16"),
        ({"residual": X[:1]}, r"residual: shape is \(1, 32\), must be \(2, 32\)"),
        ({"weight": WEIGHT.float()}, "weight: dtype is float32, must be bfloat16"),
        ({"weight": WEIGHT[:16]}, r"weight: shape is \(16,\), must be \(32,\); one factor per col"),
        ({"eps": -1e-5}, "eps: is -1e-05, must be 0 or more and finite"),
        ({"eps": float("nan")}, "eps: is nan, must be 0 or more and finite"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else "",
)
def test_refused_arguments(changed: dict[str, object], message: str) -> None:
    given = {"x": X, "residual": X, "weight": WEIGHT, "eps": EPS} | changed
    with pytest.raises(InvalidArgument, match=message):
        add_rms_norm(**given)


@SM90
@ONE_SCHEDULE
def test_refused_layout(op_device: torch.device) -> None:
    x = torch.zeros(32, 32, dtype=BF16, device=op_device)
    weight = torch.ones(64, dtype=BF16, device=op_device)
    late = x.view(-1)[4:516].view(16, 32)
    long = torch.zeros(1, MAX_K + 8, dtype=BF16, device=op_device)
    for arguments, message in (
        ((x.mT, x, weight[:32]), "x: strides are .*, the last must be 1; call contiguous"),
        ((x, x.mT, weight[:32]), "residual: strides are .*, the last must be 1; call contiguous"),
        ((x[:, :12], x[:, :12], weight[:12]), "x: K is 12, must be a multiple of 8 on sm_90"),
        ((late, x[:16], weight[:32]), "x: starts 8 bytes after a multiple of 16"),
        ((x[:16], late, weight[:32]), "residual: starts 8 bytes after a multiple of 16"),
        ((x, x, weight[::2]), "weight: strides are .*contiguous"),
        ((x, x, weight[4:36]), "weight: starts 8 bytes after a multiple of 16"),
        ((long, long, long[0]), "x: K is 24584, must be at most 24576 on sm_90"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            add_rms_norm(*arguments, EPS)


def test_devices() -> None:
    function = norm_op._add_rms_norm._init_fn
    with pytest.raises(InvalidArgument, match="weight: is on meta, must be on cpu as x is"):
        function(X, X, WEIGHT.to("meta"), EPS)
    meta = X.to("meta")
    with pytest.raises(NoKernelError, match="add_rms_norm: no float kernel for meta"):
        function(meta, meta, WEIGHT.to("meta"), EPS)
