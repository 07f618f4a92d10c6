"""Tensor memory of CTAs that reside on one SM together.

A product lets the next launch start before the product has allocated tensor memory, and
``tcgen05.alloc`` serves whichever CTA asks first. If a CTA of the next launch, which waits for the
product's end, could take the columns, the product would wait for ever.
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
    name: str
    shared: int
    columns: int


def together(one: Cta, other: Cta) -> bool:
    """Whether both CTAs fit into an SM's shared memory, but not into its tensor memory."""
    fit = one.shared + other.shared + 2 * RESERVED <= SHARED_PER_SM
    return fit and one.columns + other.columns > TENSOR_COLUMNS


def test_the_rule() -> None:
    assert together(Cta("", 100_000, 512), Cta("", 100_000, 32))
    assert not together(Cta("", 100_000, 256), Cta("", 100_000, 256))
    assert not together(Cta("", 170_000, 512), Cta("", 97_000, 256))


@pytest.mark.thorough
@pytest.mark.processes
def test_two_ctas_never_exceed_tensor_memory() -> None:
    """Every kernel of Llama 3 8B and of an indexer, beside every other and beside itself."""
    devices.cutlass_or_skip()
    found = set()
    for spec, static in measure_all(specs(None), "sm_100a", None, jobs=2):
        name, _, columns = configuration(spec)
        if columns:
            found.add(Cta(f"{spec.op} {name}", static.shared_bytes, columns))
    assert len({cta.name.partition(" ")[0] for cta in found}) >= 4
    pairs = combinations_with_replacement(sorted(found), 2)
    assert not [(one, other) for one, other in pairs if together(one, other)]
