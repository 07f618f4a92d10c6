"""Register use of the sm_90 weight-only GEMM in SASS, for the tiles that need most registers."""

from dataclasses import replace

import pytest

from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.precompile.linear_sm90 import weight_only_spec
from nvfp4_kernels.tool.instructions import NoDisassembler, find_nvdisasm
from nvfp4_kernels.tool.report import measure_all
from tests import devices

pytestmark = pytest.mark.processes

IN_TURN = (
    Tile(128, k_tiles=2, parts_in_turn=2),
    Tile(128, 2, k_tiles=2, parts_in_turn=2, weight_per_warpgroup=True),
)
FP8 = EpilogueConfig(act="float8_e4m3fn", boxes=True)
FP8_WIDEST = (
    (Tile(256, fp8=True), replace(FP8, per_token=True)),
    (Tile(256, 2, weight_per_warpgroup=True, fp8=True), replace(FP8, dtype="float8_e4m3fn")),
    (Tile(128, 2, fp8=True), replace(FP8, dtype="float8_e4m3fn")),
)


def test_sums_in_turn_stay_in_registers() -> None:
    """No spills, and overlapping wgmmas: ptxas serialises wgmmas that lack registers."""
    devices.cutlass_or_skip()
    try:
        nvdisasm = find_nvdisasm()
    except NoDisassembler as error:
        pytest.skip(str(error))
    specs = [weight_only_spec("gemm", tile, EpilogueConfig(boxes=True)) for tile in IN_TURN]
    for spec, static in measure_all(specs, "sm_90a", nvdisasm, jobs=2):
        assert not static.spills, spec
        # Four wgmmas of each K tile of a stage, for both splits; one fence and one wait for the
        # four.
        assert static.instructions["HGMMA"] == 2 * 2 * 4
        assert static.instructions["WARPGROUP"] < static.instructions["HGMMA"], spec


def test_widest_fp8_tiles_stay_in_registers() -> None:
    """No spills, and one fence and one wait for the four wgmmas of a K tile."""
    devices.cutlass_or_skip()
    try:
        nvdisasm = find_nvdisasm()
    except NoDisassembler as error:
        pytest.skip(str(error))
    specs = [weight_only_spec("gemm", *each) for each in FP8_WIDEST]
    for spec, static in measure_all(specs, "sm_90a", nvdisasm, jobs=2):
        assert not static.spills, spec
        assert static.instructions["QGMMA"] >= 4
        assert static.instructions["WARPGROUP"] < static.instructions["QGMMA"] * 2, spec
