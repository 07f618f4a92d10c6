"""Grouped products of either kind on given tiles of the block-scaled GEMM, on few SMs."""

from dataclasses import dataclass, replace

import pytest
import torch

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.formats.terms import TermLayout
from nvfp4_kernels.gemm.sm100.choose import Problem, fits, with_store
from nvfp4_kernels.gemm.sm100.choose_grouped import GroupedProblem
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile
from tests.test_kernels.few_sms import use_sms
from tests.test_kernels.gemm.grouped.tiles import Case
from tests.test_kernels.rounds import Rounds, gemm_sm100

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class TileCase:
    """A grouped product on a given tile, with ``sms`` SMs."""

    tile: Tile
    case: Case
    sms: int

    @property
    def full_tile(self) -> Tile:
        """The tile for a grouped product, with the case's numbers of weights and terms."""
        terms = TermLayout.of(self.case.terms, self.case.tile_tokens)
        return replace(self.tile, grouped=True, weights=self.case.weights, terms=terms)

    @property
    def rounds(self) -> Rounds:
        """Rounds of the accumulators and of the ring."""
        case, tile = self.case, self.full_tile
        output = EpilogueConfig(row_scale=case.row_scale)
        output = with_store(output, tile, case.n)
        return gemm_sm100(tile, output, case.tile_tokens, case.n, case.k, case.tiles, self.sms)


def use(tile_case: TileCase, patch: pytest.MonkeyPatch) -> None:
    """Make the ops use the case's tile and number of SMs."""
    from nvfp4_kernels.gemm.sm100 import launch_grouped as product

    def configured(
        problem: GroupedProblem, output: EpilogueConfig, sms: int
    ) -> tuple[Tile, EpilogueConfig]:
        tile = tile_case.full_tile
        out = with_store(output, tile, problem.n)
        one = Problem(problem.tile_tokens, problem.n, problem.k, 1, problem.weights, problem.terms)
        assert fits(one, tile, out)
        return tile, out

    patch.setattr(product, "choose_grouped", configured)
    use_sms(product, tile_case.sms, patch)


def swapped(columns: int, split_k: int = 1, max_stages: int = 3) -> Tile:
    """A swap_ab tile, whose N side holds tokens."""
    return Tile(columns, swap_ab=True, split_k=split_k, max_stages=max_stages)


RELU2 = Activation("relu2")
# One case per family of kernels with its own way of handing data over, in every schedule.
FAMILIES = {
    "swapped": TileCase(swapped(8), Case((3, 0, 17, 8), 8, 200, 544, out_dtype=BF16), 2),
    "swapped, split": TileCase(
        swapped(8, 2, 2), Case((9, 0, 1), 8, 330, 1056, row_scale=True, out_dtype=BF16), 2
    ),
    "swapped, boxes": TileCase(
        swapped(32, max_stages=2), Case((40, 0, 7), 32, 264, 544, out_dtype=BF16), 1
    ),
    "by rows": TileCase(Tile(128, max_stages=2), Case((130, 0, 9), 128, 200, 544), 1),
    "by rows, 2 CTAs": TileCase(
        Tile(128, two_cta=True, cluster_m=2, max_stages=2),
        Case((260, 0, 9), 256, 200, 544, row_scale=True),
        2,
    ),
}
OTHERS = {
    "swapped 16, relu²": TileCase(
        swapped(16), Case((3, 0, 17, 8), 16, 144, 288, activation=RELU2, out_dtype=FP16), 3
    ),
    "swapped 8, split 8": TileCase(swapped(8, 8), Case((9, 3, 1), 8, 130, 2304), 16),
    "swapped 64, split 2": TileCase(
        swapped(64, 2), Case((90, 1, 0), 64, 136, 1056, row_scale=True, out_dtype=BF16), 4
    ),
    "swapped 128": TileCase(swapped(128), Case((9, 130), 128, 136, 288, out_dtype=BF16), 2),
    "swapped 64, 2 CTAs": TileCase(
        Tile(64, swap_ab=True, two_cta=True, cluster_m=2, max_stages=2),
        Case((90, 1, 0), 64, 300, 544, row_scale=True, out_dtype=BF16),
        2,
    ),
    "swapped 256, 2 CTAs": TileCase(
        Tile(256, swap_ab=True, two_cta=True, cluster_m=2),
        Case((9, 200), 256, 328, 288, out_dtype=BF16),
        2,
    ),
    "128×256 by rows": TileCase(Tile(256), Case((130, 0, 9), 128, 264, 288, out_dtype=BF16), 2),
    "128×128 by rows of 256 tokens, split 2": TileCase(
        Tile(128, split_k=2), Case((200, 0, 9), 256, 200, 544), 4
    ),
    "128×128 by rows, multicast": TileCase(
        Tile(128, cluster_n=2), Case((130, 0, 9), 128, 264, 288), 2
    ),
    "swapped 16, bias, split 2": TileCase(
        swapped(16, 2), Case((3, 0, 17), 16, 200, 1056, row_scale=True, bias=BF16), 2
    ),
    "by rows, bias": TileCase(Tile(128), Case((130, 0, 9), 128, 200, 288, bias=FP32), 1),
    "256×256 by rows, bias": TileCase(
        Tile(256, two_cta=True, cluster_m=2), Case((260, 9), 256, 264, 288, bias=FP16), 2
    ),
    "swapped 8, 3 terms": TileCase(
        swapped(8), Case((3, 0, 17), 8, 144, 288, row_scale=True, terms=3), 2
    ),
    "by rows, 2 terms": TileCase(Tile(128), Case((130, 9), 128, 144, 288, terms=2), 2),
}
PAIR_FAMILIES = {
    "swapped": TileCase(swapped(8), Case((3, 0, 17, 8), 8, 208, 544, 2, row_scale=True), 2),
    "swapped, split": TileCase(swapped(16, 2, 2), Case((9, 0, 1, 30), 16, 336, 1056, 2), 2),
    "by rows, 2 CTAs": TileCase(
        Tile(64, two_cta=True, cluster_m=2, max_stages=2),
        Case((260, 0, 9), 256, 144, 544, 2, row_scale=True),
        2,
    ),
}
PAIRS = {
    "swapped 32, split 4": TileCase(swapped(32, 4), Case((9, 33), 32, 144, 1056, 2), 8),
    "swapped 8, split 8": TileCase(
        swapped(8, 8), Case((9, 3, 1), 8, 144, 2304, 2, row_scale=True), 16
    ),
    "swapped 64": TileCase(swapped(64), Case((90, 1, 0), 64, 144, 288, 2), 2),
    "swapped 128": TileCase(swapped(128), Case((130, 1, 0), 128, 144, 288, 2), 1),
    "swapped 128 of 256 tokens": TileCase(swapped(128), Case((130, 1, 0), 256, 144, 288, 2), 1),
    "swapped 128, 2 CTAs": TileCase(
        Tile(128, swap_ab=True, two_cta=True, cluster_m=2, max_stages=3),
        Case((130, 0, 9), 128, 336, 288, 2, row_scale=True),
        2,
    ),
    "128×128 by rows": TileCase(Tile(128), Case((130, 0, 9), 128, 208, 288, 2), 2),
    "128×64 by rows, multicast": TileCase(
        Tile(64, cluster_n=2), Case((130, 0, 9), 128, 208, 288, 2, row_scale=True), 2
    ),
    "256×128 by rows": TileCase(
        Tile(128, two_cta=True, cluster_m=2), Case((260, 0, 9), 256, 208, 288, 2), 2
    ),
    "swapped 8, bias, split 2": TileCase(
        swapped(8, 2), Case((3, 0, 17), 8, 208, 1056, 2, row_scale=True, bias=BF16), 2
    ),
    "by rows, 2 CTAs, bias": TileCase(
        Tile(64, two_cta=True, cluster_m=2), Case((260, 0, 9), 256, 144, 288, 2, bias=FP32), 2
    ),
    "swapped 16, 2 terms, split 2": TileCase(
        swapped(16, 2), Case((9, 0, 1, 30), 16, 144, 544, 2, terms=2), 2
    ),
}
