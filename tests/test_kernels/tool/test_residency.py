"""Tensor memory of CTAs that reside on one SM together.

A GEMM lets the next launch start before the GEMM has allocated tensor memory, and ``tcgen05.alloc``
serves the CTA that asks first. If a CTA of the next launch, which waits for the GEMM's end, could
take the columns, the GEMM would wait for ever. Attention and the indexer's scorers allocate before
they let the next launch start, so that a launch after them finds the columns taken, and waits.
"""

from itertools import combinations_with_replacement
from typing import NamedTuple

import pytest

from nvfp4_kernels.sm100.limits import TENSOR_COLUMNS
from nvfp4_kernels.tool.report import configuration, measure_all
from tests import devices
from tests.sass.__main__ import specs

SHARED_PER_SM, RESERVED = 228 * 1024, 1024  # bytes of an SM, and of these for each CTA's system use


class Cta(NamedTuple):
    """CTA of a kernel, by op and tile; sizes in bytes and columns."""

    name: str
    shared: int
    columns: int

    @property
    def releases_early(self) -> bool:
        """Whether the next launch may start before this CTA has allocated tensor memory."""
        return "gemm" in self.name.partition(" ")[0]


def conflict(one: Cta, other: Cta) -> bool:
    """Whether both fit into an SM's shared memory, but not into its tensor memory, and may meet."""
    fit = one.shared + other.shared + 2 * RESERVED <= SHARED_PER_SM
    meet = one.releases_early or other.releases_early
    return fit and meet and one.columns + other.columns > TENSOR_COLUMNS


def test_the_rule() -> None:
    assert conflict(Cta("gemm", 100_000, 512), Cta("attention", 100_000, 32))
    assert conflict(Cta("attention", 100_000, 32), Cta("silu_mul_gemm", 100_000, 512))
    assert not conflict(Cta("gemm", 100_000, 256), Cta("gemm", 100_000, 256))
    assert not conflict(Cta("gemm", 170_000, 512), Cta("attention", 97_000, 256))
    assert not conflict(Cta("attention", 100_000, 256), Cta("scores", 111_000, 512))


@pytest.mark.thorough
@pytest.mark.processes
def test_two_ctas_never_exceed_tensor_memory() -> None:
    """Every kernel of Llama 3 8B and of an indexer, with every other and with itself."""
    devices.cutlass_or_skip()
    found = set()
    for spec, static in measure_all(specs(None), "sm_100a", None, jobs=2):
        name, _, columns = configuration(spec)
        if columns:
            found.add(Cta(f"{spec.op} {name}", static.shared_bytes, columns))
    assert len({cta.name.partition(" ")[0] for cta in found}) >= 4
    assert {cta.releases_early for cta in found} == {True, False}
    pairs = combinations_with_replacement(sorted(found), 2)
    assert not [(one, other) for one, other in pairs if conflict(one, other)]
