"""Shared-memory descriptors in machine code: additions never carry into the high word.

``python -m tests.sass`` checks every kernel of a model; these tests check one of each kind.
"""

from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from nvfp4_kernels.attention.sm100.tile import AttentionTile
from nvfp4_kernels.attention.sm100.tile import Variant as AttentionVariant
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant as ScoreVariant
from nvfp4_kernels.precompile.attention_sm100 import attention_spec
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.tool.build import prepare
from nvfp4_kernels.tool.instructions import NoDisassembler, find_nvdisasm
from nvfp4_kernels.tool.report import product_spec
from nvfp4_kernels.tool.scoring import scorer_spec
from tests import devices
from tests.sass.compiled import check_all, check_one
from tests.sass.descriptors import Checked, check

GEMM = product_spec(
    "gemm", Tile(256, two_cta=True, cluster_m=2), EpilogueConfig("bfloat16", store="tma")
)
SWAPPED = product_spec("silu_mul_gemm", Tile(16, 2, swap_ab=True), EpilogueConfig("bfloat16"))
PAGED = AttentionVariant("bfloat16", "paged", 16, causal=True)
KERNELS = [
    GEMM,
    SWAPPED,
    product_spec("gemm", Tile(64, scale_sets=2), EpilogueConfig("bfloat16", store="vector")),
    attention_spec(AttentionTile(128), PAGED),
    attention_spec(AttentionTile(64, fp8=True), PAGED),
    scorer_spec(ScoreTile("nvfp4", 128, 64), ScoreVariant(64, query_factors=False)),
    scorer_spec(ScoreTile("bf16", 64, 64), ScoreVariant(0, query_factors=False)),
]
READERS = {"UTCCP", "UTCOMMA", "UTCHMMA", "UTCQMMA"}


def nvdisasm() -> Path:
    devices.cutlass_or_skip()
    try:
        return find_nvdisasm()
    except NoDisassembler as error:
        pytest.skip(str(error))


@pytest.mark.processes
def test_high_words_are_constants() -> None:
    readers: Counter[str] = Counter()
    for spec, checked in check_all(KERNELS, "sm_100a", nvdisasm(), jobs=2):
        assert not checked.faults, spec
        assert checked.readers.total() == checked.high_words.total() > 0, spec
        readers += checked.readers
    assert readers.keys() == READERS


def with_plain_additions(spec: KernelSpec, disassembler: Path) -> Checked:
    """Check a GEMM whose descriptors advance by plain 64-bit additions."""
    mma: Any = import_module("nvfp4_kernels.gemm.sm100.mma")
    mma.advance = lambda descriptor, units: descriptor + units
    return check_one(spec, disassembler)


@pytest.mark.processes
def test_plain_additions_are_found() -> None:
    with ProcessPoolExecutor(1, get_context("spawn"), prepare, ("sm_100a",)) as pool:
        checked = pool.submit(with_plain_additions, GEMM, nvdisasm()).result()
    # 12 atoms of scales; 4 MMAs with two operands each.
    assert checked.readers == {"UTCCP": 12, "UTCOMMA": 8}
    assert len(checked.faults) == 20
    assert any("is made by" in fault and "UIADD3" in fault for fault in checked.faults)


# --- the check itself -------------------------------------------------------------------------

LISTING = """
.text.kernel:
        /*0000*/                   UMOV UR9, {first} ;
        /*0010*/                   BRA.U !UP0, `(.L_x_1) ;
        /*0020*/                   {second} ;
.L_x_1:
        /*0030*/                   UIADD3 UR8, UPT, UPT, UR6, 0x20, URZ ;
        /*0040*/                   UTCCP.T.S.4x32dp128bit tmem[UR5], gdesc[UR8] ;
        /*0050*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("first", "second", "fault"),
    [
        ("0x4008", "NOP", ""),
        ("0x4008", "UMOV UR9, 0x40004040", ""),
        ("0x4008", "@!UP1 UMOV UR9, 0x40004040", ""),
        ("0x4009", "NOP", "may be 0x4009"),
        ("0x4008", "UMOV UR9, 0x8", "may be 0x8"),
        ("0x4008", "UIADD3.X UR9, UPT, UPT, UR9, URZ, URZ, UP1, !UPT", "made by 0x20: UIADD3.X"),
        ("0x4008", "UIADD3.64 UR8, UPT, UPT, UR8, 0x20, URZ", "made by 0x20: UIADD3.64"),
        ("0x4008", "UMOV UR9, UR4", "is UR4 of before"),
        ("0x4008", "UMOV UR9, c[0x0][0x380]", "made by 0x20: UMOV"),
        ("0x4008", "R2UR UR9, R3", "is R3 of before"),
        ("0x4008", "CALL.REL.NOINC `(.L_x_1)", "is UR9 of before"),
    ],
)
def test_what_reaches_a_high_word(first: str, second: str, fault: str) -> None:
    checked = check(LISTING.format(first=first, second=second))
    assert checked.readers == {"UTCCP": 1}
    assert bool(checked.faults) == bool(fault), checked.faults
    assert all(fault in each for each in checked.faults)


def test_values_come_through_loops_and_vector_registers() -> None:
    listing = """
.text.kernel:
        /*0000*/                   HFMA2 R3, -RZ, RZ, 2.125, 2.125 ;
        /*0010*/                   IMAD.MOV.U32 R2, RZ, RZ, R3 ;
.L_x_1:
        /*0020*/                   R2UR UR9, R2 ;
        /*0030*/                   UTCHMMA tmem[UR4], gdesc[UR8], tmem[UR6], idesc[UR11] ;
        /*0040*/              @!P0 BRA `(.L_x_1) ;
        /*0050*/                   EXIT ;
"""
    checked = check(listing)
    assert checked.high_words == {0x40404040: 1}
    assert "high word UR9 may be 0x40404040" in checked.faults[0]
