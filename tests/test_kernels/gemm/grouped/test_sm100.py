"""``grouped_gemm`` on sm_100: every family of tiles, and extremes of routing."""

import pytest
import torch

from nvfp4_kernels import InvalidArgument, grouped_gemm
from nvfp4_kernels.activation import Activation
from tests.test_kernels.gemm.grouped.families import FAMILIES, OTHERS, TileCase, swapped, use
from tests.test_kernels.gemm.grouped.tiles import (
    Case,
    arguments,
    check_exact,
    check_quantized,
    of_reference,
)

pytestmark = pytest.mark.arch("sm_100")
once = pytest.mark.schedules("random 1")
# gemm's tests run every family of tiles, with the same barriers, in every schedule; here are the
# extremes that token tiles add.
EXTREMES = pytest.mark.schedules("eager", "all late", "random 1")

ROUTED = {
    "nothing": Case((0, 0, 0), 8, 144, 96),
    "one token": Case((0, 1, 0), 8, 144, 96),
    "one expert has all": Case((0, 50, 0), 8, 144, 96),
    "an expert per token": Case((1,) * 8, 8, 144, 96),
    "384 experts": Case((2,) + (0,) * 190 + (1, 9) + (0,) * 190 + (1,), 8, 32, 64),
    "no spare room": Case((3, 9), 16, 144, 96, spare=0),
    "96 rows": Case((3, 0, 9), 16, 96, 64),
    "1856 rows": Case((3, 0, 9), 32, 1856, 64),
    "256 tokens": Case((3, 0, 290), 256, 144, 96),
}


def test_some_family_goes_round() -> None:
    assert sum(each.rounds.enough for each in FAMILIES.values()) >= 3


@EXTREMES
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FAMILIES[name], monkeypatch)
    check_exact(grouped_gemm, FAMILIES[name].case)


@once
@pytest.mark.parametrize("name", OTHERS)
def test_tiles(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use(OTHERS[name], monkeypatch)
    check_exact(grouped_gemm, OTHERS[name].case)


@once
@pytest.mark.parametrize("name", ROUTED)
def test_routed(name: str, op_device: torch.device) -> None:
    check_exact(grouped_gemm, ROUTED[name])


@once
@pytest.mark.parametrize("name", ["swapped", "swapped, split", "by rows"])
def test_quantized(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FAMILIES[name].case
    given = TileCase(FAMILIES[name].tile, case, FAMILIES[name].sms)
    use(given, monkeypatch)
    whole = Case(case.counts, case.tile_tokens, 208, case.k, row_scale=case.row_scale)
    check_quantized(grouped_gemm, whole)


@once
def test_quantized_to_terms(op_device: torch.device) -> None:
    check_quantized(grouped_gemm, Case((3, 0, 9), 8, 144, 96), out_terms=2)


@EXTREMES
@pytest.mark.parametrize(
    ("tile", "sms"), [(swapped(8, 2), 4), (swapped(8, 4), 16)], ids=["split 2", "split 4"]
)
def test_clusters_without_work(
    tile: object, sms: int, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grid for the worst case: most clusters, or all, have no tile."""
    for counts in ((0, 0), (0, 3)):
        case = Case(counts, 8, 144, 1056, spare=8)
        use(TileCase(tile, case, sms), monkeypatch)  # type: ignore[arg-type]
        check_exact(grouped_gemm, case)


@once
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_activations(name: str, op_device: torch.device) -> None:
    """Results are within a few roundings of the formula's."""
    case = Case((8, 8), 8, 144, 96, activation=Activation(name), spare=0)
    args = arguments(case)
    args["alpha"] = torch.tensor([2.0**-5, 2.0**-7])
    expected = of_reference(case, args)
    out = grouped_gemm(**args, out_dtype=torch.float32)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)
    assert (expected.abs() > 0.1).any()


@once
def test_unpadded_k_is_refused(op_device: torch.device) -> None:
    args = arguments(Case((3,), 8, 144, 48))
    with pytest.raises(InvalidArgument, match=r"b: K is 48, .* multiple of 32 on sm_100.*at load"):
        grouped_gemm(**args)
