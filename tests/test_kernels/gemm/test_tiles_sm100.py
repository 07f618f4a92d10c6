"""Every family of tiles of the block-scaled GEMM, independent of the chooser."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from nvfp4_kernels import gemm, silu_mul_gemm
from nvfp4_kernels.formats.terms import TermLayout
from nvfp4_kernels.gemm.sm100.choose import Problem, fits, with_store
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile
from tests.test_kernels.few_sms import use_sms
from tests.test_kernels.gemm.linear_cases import Case, check_exact
from tests.test_kernels.gemm.silu_mul import test_silu_mul_gemm
from tests.test_kernels.gemm.test_sm100 import check_quantized, on
from tests.test_kernels.rounds import Rounds, gemm_sm100

# The tests of mutants run every schedule; this one exposes every mutant that any schedule exposes.
pytestmark = [pytest.mark.arch("sm_100"), pytest.mark.schedules("random 1")]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class TileCase:
    """A product on a given tile, on few SMs, so that a CTA has several tiles."""

    tile: Tile
    case: Case
    sms: int
    direct: bool = False

    @property
    def family(self) -> str:
        """Name of the tile's family; kernels of different families hand data over differently."""
        tile = self.tile
        words = ["gate and up"] * (tile.weights == 2) + ["swapped"] * tile.swap_ab
        words += ["2 CTAs"] * tile.two_cta + ["split"] * (tile.split_k > 1)
        words += ["multicast"] * (tile.split_k == 1 and tile.cluster > tile.ctas)
        return ", ".join(words) or "plain"

    @property
    def of_terms(self) -> str:
        """Name of the family, and the tile's use of terms."""
        terms = self.tile.terms
        return self.family + ", terms" * (terms.count > 1) + ", packed" * terms.packed

    @property
    def rounds(self) -> Rounds:
        """Rounds of the accumulators and of the ring."""
        case = self.case
        dtype: Any = str(case.out_dtype).removeprefix("torch.")
        bias = str(case.bias).removeprefix("torch.") if case.bias else ""
        shards = max(1, len(case.shards))
        output = EpilogueConfig(dtype, shards=shards, bias=bias, row_scale=case.row_scale)
        output = with_store(output, self.tile, case.n)
        sizes = case.m, case.n, case.k, math.prod(case.batch)
        return gemm_sm100(self.tile, output, *sizes, self.sms)


def terms(count: int, packed: bool = False) -> TermLayout:
    return TermLayout(count, packed)


ALL = Case(300, 208, 1312, shards=(100, 60, 48), bias=FP32, row_scale=True, out_dtype=BF16)
GEMM = {
    "128x128": TileCase(Tile(128), Case(300, 264, 1568, out_dtype=BF16), 3),
    "128x128, one K step": TileCase(Tile(128), Case(130, 128, 64), 1),
    "128x128, everything": TileCase(Tile(128), ALL, 3),
    "128x128, from registers": TileCase(Tile(128), ALL, 3, direct=True),
    "128x128, N of 203": TileCase(Tile(128), Case(130, 203, 96, out_dtype=FP16), 3),
    "128x256, overlapping": TileCase(Tile(256), Case(384, 512, 768, out_dtype=FP32), 1),
    "128x64, half atoms": TileCase(Tile(64), Case(150, 328, 832, out_dtype=BF16), 2),
    "128x96, atoms and a quarter": TileCase(
        Tile(96), Case(150, 488, 832, bias=FP32, out_dtype=BF16), 2
    ),
    "256x96, multicast 4x1": TileCase(
        Tile(96, two_cta=True, cluster_m=4), Case(600, 424, 832, out_dtype=FP32), 4
    ),
    "256x256": TileCase(
        Tile(256, two_cta=True, cluster_m=2), Case(600, 520, 1312, out_dtype=FP32), 4
    ),
    "256x128, everything": TileCase(
        Tile(128, two_cta=True, cluster_m=2), replace(ALL, m=600, k=832), 2
    ),
    "256x64": TileCase(Tile(64, two_cta=True, cluster_m=2), Case(300, 136, 832, out_dtype=BF16), 2),
    "multicast 2x2": TileCase(
        Tile(128, cluster_m=2, cluster_n=2), Case(400, 400, 1536, out_dtype=BF16), 4
    ),
    "multicast 1x4": TileCase(Tile(128, cluster_n=4), Case(200, 1040, 832, out_dtype=BF16), 4),
    "256x256, multicast 4x2": TileCase(
        Tile(256, two_cta=True, cluster_m=4, cluster_n=2), Case(600, 1040, 832, out_dtype=BF16), 8
    ),
    "split 4": TileCase(Tile(128, split_k=4), Case(200, 304, 2080, out_dtype=BF16), 4),
    "split 2, everything": TileCase(Tile(128, split_k=2), ALL, 4),
    "128x64, batched": TileCase(Tile(64), Case(200, 200, 832, batch=(2,), out_dtype=BF16), 2),
    "128x64, two groups of rows": TileCase(
        Tile(64), Case(1200, 130, 64, batch=(2,), out_dtype=BF16), 7
    ),
    "swapped 32, everything": TileCase(
        Tile(32, swap_ab=True),
        Case(29, 300, 1312, shards=(100, 200), bias=FP16, row_scale=True, out_dtype=BF16),
        2,
    ),
    "swapped 8, split 4": TileCase(
        Tile(8, swap_ab=True, split_k=4),
        Case(5, 300, 2080, row_scale=True, batch=(2,), out_dtype=BF16),
        8,
    ),
    "swapped 8, split 8": TileCase(
        Tile(8, swap_ab=True, split_k=8), Case(7, 130, 2304, batch=(2,), batched_weight=True), 16
    ),
    "swapped 16, many tiles": TileCase(
        Tile(16, swap_ab=True, max_stages=2), Case(9, 700, 320, out_dtype=BF16), 1
    ),
    "swapped 8, split 2, many tiles": TileCase(
        Tile(8, swap_ab=True, split_k=2, max_stages=2), Case(5, 700, 1024, out_dtype=BF16), 2
    ),
    "128x128, two scale sets": TileCase(
        Tile(128, scale_sets=2), Case(300, 264, 2080, out_dtype=BF16), 2
    ),
    "128x256, two scale sets, two stages": TileCase(
        Tile(256, scale_sets=2, max_stages=2), Case(200, 512, 1568, out_dtype=FP32), 1
    ),
    "256x256, multicast 4x2, two scale sets": TileCase(
        Tile(256, two_cta=True, cluster_m=4, cluster_n=2, scale_sets=2),
        Case(600, 1040, 2080, out_dtype=BF16),
        8,
    ),
    "swapped 8, split 4, two scale sets": TileCase(
        Tile(8, swap_ab=True, split_k=4, scale_sets=2), Case(5, 300, 4096, out_dtype=BF16), 8
    ),
    "swapped 64, everything": TileCase(
        Tile(64, swap_ab=True, max_stages=3),
        Case(180, 400, 832, shards=(100, 300), bias=FP16, row_scale=True, out_dtype=BF16),
        2,
    ),
    "swapped 64, split 2": TileCase(
        Tile(64, swap_ab=True, split_k=2, max_stages=2),
        Case(100, 520, 1600, batch=(2,), out_dtype=FP16),
        4,
    ),
    "swapped 64, multicast 2x1, float32": TileCase(
        Tile(64, swap_ab=True, cluster_m=2, max_stages=3), Case(70, 900, 832, out_dtype=FP32), 2
    ),
    "swapped 64, multicast 1x2": TileCase(
        Tile(64, swap_ab=True, cluster_n=2, max_stages=3), Case(250, 520, 832, out_dtype=BF16), 4
    ),
    "128x128, 3 terms": TileCase(
        Tile(128, terms=terms(3)), Case(300, 264, 832, out_dtype=BF16, terms=3), 2
    ),
    "128x96, atoms and a quarter, 2 terms": TileCase(
        Tile(96, terms=terms(2)), Case(150, 488, 832, bias=FP32, out_dtype=BF16, terms=2), 2
    ),
    "128x256, overlapping, 3 terms": TileCase(
        Tile(256, terms=terms(3)), Case(384, 512, 768, terms=3), 1
    ),
    "256x256, 3 terms, batched": TileCase(
        Tile(256, two_cta=True, cluster_m=2, terms=terms(3)),
        Case(300, 520, 832, batch=(2,), batched_weight=True, terms=3),
        2,
    ),
    "256x256, multicast 4x2, 2 terms, two scale sets": TileCase(
        Tile(256, two_cta=True, cluster_m=4, cluster_n=2, scale_sets=2, terms=terms(2)),
        Case(600, 1040, 2080, out_dtype=BF16, terms=2),
        8,
    ),
    "256x128, everything, 2 terms": TileCase(
        Tile(128, two_cta=True, cluster_m=2, terms=terms(2)), replace(ALL, m=600, k=832, terms=2), 2
    ),
    "128x128, multicast 2x2, 2 terms": TileCase(
        Tile(128, cluster_m=2, cluster_n=2, terms=terms(2)),
        Case(700, 400, 1536, out_dtype=BF16, terms=2),
        4,
    ),
    "split 2, everything, 2 terms": TileCase(
        Tile(128, split_k=2, terms=terms(2)), replace(ALL, m=700, terms=2), 4
    ),
    "swapped 8, 4 terms, split 4": TileCase(
        Tile(8, swap_ab=True, split_k=4, max_stages=2, terms=terms(4, packed=True)),
        Case(5, 600, 2080, row_scale=True, batch=(2,), out_dtype=BF16, terms=4),
        4,
    ),
    "swapped 16, 3 terms, many tiles": TileCase(
        Tile(16, swap_ab=True, max_stages=2, terms=terms(3, packed=True)),
        Case(9, 700, 576, out_dtype=BF16, terms=3),
        1,
    ),
    "swapped 32, 2 terms, everything": TileCase(
        Tile(32, swap_ab=True, max_stages=3, terms=terms(2, packed=True)),
        Case(29, 400, 1312, shards=(100, 300), bias=FP16, row_scale=True, out_dtype=BF16, terms=2),
        1,
    ),
    "swapped 32, 3 terms, two tiles of tokens": TileCase(
        Tile(32, swap_ab=True, max_stages=3, terms=terms(3)),
        Case(50, 400, 832, batch=(2,), out_dtype=BF16, terms=3),
        2,
    ),
    "swapped 64, 4 terms, multicast 1x2": TileCase(
        Tile(64, swap_ab=True, cluster_n=2, max_stages=2, terms=terms(4)),
        Case(250, 520, 832, out_dtype=BF16, terms=4),
        4,
    ),
    "swapped 64, 3 terms, multicast 2x1": TileCase(
        Tile(64, swap_ab=True, cluster_m=2, max_stages=2, terms=terms(3)),
        Case(70, 900, 832, terms=3),
        2,
    ),
    "swapped 96": TileCase(Tile(96, swap_ab=True), Case(200, 328, 832, out_dtype=BF16), 2),
    "swapped 128x256": TileCase(Tile(256, swap_ab=True), Case(256, 130, 832, out_dtype=BF16), 1),
}
PAIRS = {
    "128x128": TileCase(Tile(128, 2), Case(300, 208, 1312, row_scale=True), 1),
    "128x64": TileCase(Tile(64, 2), Case(140, 208, 832), 1),
    "256x128": TileCase(Tile(128, 2, two_cta=True, cluster_m=2), Case(600, 208, 832), 2),
    "256x96": TileCase(Tile(96, 2, two_cta=True, cluster_m=2), Case(600, 208, 832), 2),
    "split 2": TileCase(Tile(64, 2, split_k=2), Case(140, 144, 832), 2),
    "swapped 16, split 2": TileCase(
        Tile(16, 2, swap_ab=True, split_k=2), Case(9, 720, 1312, row_scale=True), 2
    ),
    "swapped 32": TileCase(Tile(32, 2, swap_ab=True), Case(30, 720, 832), 1),
    "swapped 128, overlapping": TileCase(
        Tile(128, 2, swap_ab=True, max_stages=2), Case(200, 400, 832, row_scale=True), 1
    ),
    "128x64, 3 terms": TileCase(
        Tile(64, 2, max_stages=3, terms=terms(3)), Case(140, 208, 832, terms=3), 1
    ),
    "256x96, 2 terms": TileCase(
        Tile(96, 2, two_cta=True, cluster_m=2, terms=terms(2)), Case(600, 208, 832, terms=2), 2
    ),
    "swapped 16, split 2, 4 terms": TileCase(
        Tile(16, 2, swap_ab=True, split_k=2, max_stages=2, terms=terms(4, packed=True)),
        Case(9, 720, 1312, row_scale=True, terms=4),
        2,
    ),
    "swapped 64, 2 terms": TileCase(
        Tile(64, 2, swap_ab=True, max_stages=3, terms=terms(2)),
        Case(100, 720, 832, row_scale=True, terms=2),
        2,
    ),
    "swapped 64, two columns of tiles": TileCase(
        Tile(64, 2, swap_ab=True), Case(90, 720, 832, row_scale=True), 2
    ),
}


FAMILIES = sorted({each.family for each in (*GEMM.values(), *PAIRS.values())})


@pytest.mark.parametrize(
    "family", sorted({each.of_terms for each in (*GEMM.values(), *PAIRS.values())})
)
def test_each_family_goes_round(family: str) -> None:
    rounds = {
        name: each.rounds
        for name, each in (GEMM | {f"pair {name}": each for name, each in PAIRS.items()}).items()
        if each.of_terms == family
    }
    assert any(each.enough for each in rounds.values()), rounds


def use(tile_case: TileCase, patch: pytest.MonkeyPatch) -> None:
    """Make the ops use the case's tile and number of SMs."""
    from nvfp4_kernels.gemm.sm100 import launch as product

    def configured(
        problem: Problem, output: EpilogueConfig, sms: int
    ) -> tuple[Tile, EpilogueConfig]:
        tile = tile_case.tile
        out = with_store(output, tile, problem.n)
        if tile_case.direct:
            out = replace(out, store="vector")
        assert fits(problem, tile, out)
        return tile, out

    patch.setattr(product, "choose_config", configured)
    use_sms(product, tile_case.sms, patch)


@pytest.mark.parametrize("name", GEMM)
def test_gemm(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use(GEMM[name], monkeypatch)
    check_exact(on(op_device, gemm), GEMM[name].case)


def pair_case(case: Case) -> test_silu_mul_gemm.Case:
    return test_silu_mul_gemm.Case(
        case.m, case.n, case.k, case.batch, row_scale=case.row_scale, terms=case.terms
    )


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use(PAIRS[name], monkeypatch)
    test_silu_mul_gemm.check_exact(on(op_device, silu_mul_gemm), pair_case(PAIRS[name].case))


# 64 columns are stored at once: more than halves of 64, and no divisor of 96.
@pytest.mark.parametrize("name", sorted(PAIRS.keys() - {"split 2", "256x96", "256x96, 2 terms"}))
def test_quantized(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use(PAIRS[name], monkeypatch)
    check_quantized(pair_case(PAIRS[name].case), op_device)


@pytest.mark.parametrize("out_terms", [2, 3, 4])
@pytest.mark.parametrize("name", ["128x64, 3 terms", "swapped 16, split 2", "swapped 64, 2 terms"])
def test_quantized_to_terms(
    name: str, out_terms: int, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(PAIRS[name], monkeypatch)
    check_quantized(pair_case(PAIRS[name].case), op_device, out_terms)


def test_few_tokens_by_rows(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms of up to 32 tokens share scale atoms, also in an epilogue with one row per thread."""
    use(PAIRS["128x64"], monkeypatch)
    check_quantized(test_silu_mul_gemm.Case(19, 208, 832, batch=(2,)), op_device, 3)
