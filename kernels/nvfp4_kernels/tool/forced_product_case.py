"""Cases of GEMMs on forced tiles, launched repeatedly; every result must be exact."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nvfp4_kernels.gemm.call import GemmCall
from nvfp4_kernels.gemm.sm100.tile import Tile
from nvfp4_kernels.tool.operands import grid_operand, grid_terms
from nvfp4_kernels.tool.product_case import compare_exact
from nvfp4_kernels.tool.report import describe
from nvfp4_kernels.tool.task import Figures, Machine
from nvfp4_kernels.tool.timed_graphs import captured

SECTION = "silicon"
ALPHA = 2.0**-6
BATCH = 50  # launches whose results are kept, and compared together


@dataclass(frozen=True)
class ForcedProductCase:
    """GEMM on forced tiles, in consecutive programmatic dependent launches.

    Attributes:
        what: property that the case tests, for its name.
        tiles: tiles that the launches use in turn.
        m, n, k: sizes.
        launches: number of launches.
        terms: number of NVFP4 terms of the activations.
    """

    what: str
    tiles: tuple[Tile, ...]
    m: int
    n: int
    k: int
    launches: int = BATCH
    terms: int = 1

    @property
    def section(self) -> str:
        """Section of the report."""
        return SECTION

    @property
    def name(self) -> str:
        """Name in the report."""
        tiles = " and ".join(describe(tile) for tile in self.tiles)
        terms = f"{self.terms} terms, " if self.terms > 1 else ""
        sizes = f"{self.m}×{self.n}×{self.k}"
        return f"{self.what}, {terms}{tiles}, {sizes}, {self.launches} launches"

    def run(self, machine: Machine) -> Figures:
        """Compare every launch's result with the exact result, bit by bit."""
        from nvfp4_kernels.gemm.sm100.launch import gemm

        seeded = torch.Generator(machine.device).manual_seed(0)
        b = grid_operand((self.n, self.k), seeded)
        if self.terms > 1:
            a = grid_terms(self.terms, (self.m, self.k), seeded)
        else:
            a = grid_operand((self.m, self.k), seeded)
        alpha = torch.full((1,), ALPHA, device=machine.device)
        expected = (a.values @ b.values.mT * ALPHA).bfloat16()
        operands = a.data, a.scales, b.data, b.scales, alpha
        call = GemmCall(*operands, [self.n], None, None, torch.bfloat16, self.terms)

        def launch(tile: Tile) -> Tensor:
            return gemm(call, tile=tile)[0]

        steps = [partial(launch, tile) for tile in self.tiles]
        values = 0
        for result in _results(machine, steps, self.launches):
            compare_exact(result, expected)
            values += result.numel()
        return {"values": float(values)}


def _results(
    machine: Machine, steps: Sequence[Callable[[], Tensor]], launches: int
) -> Iterator[Tensor]:
    """Results of at least ``launches`` launches; on a GPU, back to back in CUDA graphs."""
    for step in steps:
        yield step()  # compiled now, and not while a graph is captured
    if machine.device.type != "cuda":
        for number in range(len(steps), launches):
            yield steps[number % len(steps)]()
        return
    results: list[Tensor] = []

    def keep(step: Callable[[], Tensor]) -> None:
        results.append(step())

    graph = captured([partial(keep, step) for step in steps], BATCH)
    del results[0]  # was launched before the graph was captured
    for _ in range(-(-launches // graph.launches)):
        for result in results:
            result.fill_(torch.nan)
        graph.graph.replay()
        yield from results
