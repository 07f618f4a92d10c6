"""Collector buffers: an MMA may reuse only the operand that was kept."""

import pytest

from tests.emulator.findings import IllegalInstruction
from tests.test_emulator.test_machine_tensor import GEMM, MMA, gemm

FILL = MMA.replace("kind::f16", "kind::f16.collector::a::fill")
# The same product twice: the second MMA adds to the first.
AGAIN = MMA.replace("kind::f16", "kind::f16.collector::a::{}").replace("%p4", "%p7")
ON = "setp.ne.u32 %p7, %r90, 99;"


def with_mmas(*mmas: str) -> str:
    return GEMM.replace(MMA, "\n    ".join([ON, *mmas]))


@pytest.mark.parametrize("last", ["use", "lastuse"])
def test_a_kept_operand_counts_as_read_once(last: str) -> None:
    _, once, expected = gemm()
    launch, twice, _ = gemm(with_mmas(FILL, AGAIN.format(last)))
    assert (once == expected).all()
    assert (twice == 2 * expected).all()
    assert sum(launch.counters.multiplies.values()) == 2


@pytest.mark.parametrize(
    ("mmas", "message"),
    [
        ([MMA, AGAIN.format("use")], r"collector::a::use .*: buffer a holds nothing; fill it"),
        (
            [FILL, AGAIN.format("lastuse"), AGAIN.format("use")],
            r"collector::a::use .*: buffer a holds nothing",
        ),
        (
            [FILL, AGAIN.format("use").replace("%rd5, %rd6", "%rd6, %rd5")],
            r"collector::a::use for the operand at 0x\w+: buffer a holds the operand at 0x",
        ),
    ],
    ids=["never filled", "used for the last time", "another operand"],
)
def test_what_is_not_kept_is_not_used(mmas: list[str], message: str) -> None:
    with pytest.raises(IllegalInstruction, match=message):
        gemm(with_mmas(*mmas))
