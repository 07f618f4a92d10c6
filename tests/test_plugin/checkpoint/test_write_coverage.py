"""Writes to tensors and to views of tensors are tracked, on the CPU and on the meta device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm_fp4_plugin.checkpoint.write_coverage import WriteCoverage

ROW = 16  # bytes


def holes_after(write: Callable[[Tensor], object], device: str) -> list[tuple[int, int]]:
    tensor = torch.nn.Parameter(torch.empty(8, 4, device=device), requires_grad=False)
    coverage = WriteCoverage([tensor])
    with coverage:
        write(tensor)
    return [tuple(hole) for hole in coverage.holes(tensor)]


def columns(tensor: Tensor) -> None:
    tensor.narrow(1, 1, 2).copy_(torch.ones(8, 2))
    tensor[:, 0].fill_(0)


CASES: dict[str, tuple[Callable[[Tensor], object], list[tuple[int, int]]]] = {
    "nothing": (lambda t: t.clone(), [(0, 8 * ROW)]),
    "all": (lambda t: t.data.copy_(torch.ones(8, 4)), []),
    "transposed": (lambda t: t.t().copy_(torch.ones(4, 8)), []),
    "other dtype": (lambda t: t.data.view(torch.int32).copy_(torch.ones(8, 4)), []),
    "rows": (lambda t: t.data[2:5].copy_(torch.ones(3, 4)), [(0, 2 * ROW), (5 * ROW, 8 * ROW)]),
    "rows twice": (lambda t: [t[:4].copy_(torch.ones(4)) for _ in "ab"], [(4 * ROW, 8 * ROW)]),
    "rows that overlap": (
        lambda t: [t[:5].copy_(torch.ones(4)), t[3:7].copy_(torch.ones(4))],
        [(7 * ROW, 8 * ROW)],
    ),
    "rows within rows": (
        lambda t: [t[:5].copy_(torch.ones(4)), t[1:2].copy_(torch.ones(4))],
        [(5 * ROW, 8 * ROW)],
    ),
    "columns": (columns, [(row * ROW + 12, row * ROW + 16) for row in range(8)]),
    "rows and padding": (lambda t: [t[:6].copy_(torch.ones(4)), t[6:].fill_(0)], []),
    "zeros, then rows": (lambda t: [t.zero_(), t[:6].copy_(torch.ones(4))], [(6 * ROW, 8 * ROW)]),
    "zeros alone": (lambda t: t.zero_(), []),
    "no rows": (lambda t: t[:0].copy_(torch.ones(4)), [(0, 8 * ROW)]),
    "out argument": (lambda t: torch.add(t[1], 1, out=t[0]), [(ROW, 8 * ROW)]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_holes(case: str, device: str) -> None:
    write, expected = CASES[case]
    assert holes_after(write, device) == expected


def test_a_part_of_a_larger_tensor_has_holes_of_its_own() -> None:
    whole = torch.empty(8, 4)
    part = whole[4:]
    coverage = WriteCoverage([part])
    with coverage:
        whole[2:6].copy_(torch.ones(4))
    assert coverage.holes(part) == [(2 * ROW, 4 * ROW)]


def test_other_storage_counts_as_written() -> None:
    tensor = torch.nn.Parameter(torch.empty(8), requires_grad=False)
    coverage = WriteCoverage([tensor])
    with coverage:
        tensor.data = torch.ones(8)
    assert coverage.holes(tensor) == []


def test_writes_before_and_after_do_not_count() -> None:
    tensor = torch.empty(8)
    coverage = WriteCoverage([tensor])
    tensor.copy_(torch.ones(8))
    with coverage:
        pass
    tensor.copy_(torch.ones(8))
    assert coverage.holes(tensor) == [(0, 32)]
