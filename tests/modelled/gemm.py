"""Modelled time of the block-scaled GEMM on a B200, against the speed of light.

    python -m tests.modelled.gemm                  a contest's shapes, a Llama 8B's layers
    python -m tests.modelled.gemm --shape 128,7168,2048 --all    every tile, fastest first

One cluster runs in the emulator, with as many tiles as the busiest cluster of the grid; the time
model (``tests/emulator/timing``) builds the whole grid from it. Nothing here was measured on a
B200.
"""

import argparse
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.emulator.machine.launch import Launch
from tests.emulator.runtime import shim
from tests.emulator.timing import Timing, model, speed_of_light
from tests.emulator.timing.device import TimedGpu

if TYPE_CHECKING:
    from nvfp4_kernels.formats.terms import TermLayout
    from nvfp4_kernels.gemm.sm100.choose import Problem
    from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile

# M, N, K, batch, weights.
SHAPES = {
    "GEMV 7168×16384": (1, 7168, 16384, 1, 1),
    "GEMV 4096×7168 ×8": (1, 4096, 7168, 8, 1),
    "GEMV 7168×2048 ×4": (1, 7168, 2048, 4, 1),
    "GEMM 128×7168×16384": (128, 7168, 16384, 1, 1),
    "GEMM 128×4096×7168": (128, 4096, 7168, 1, 1),
    "GEMM 128×7168×2048": (128, 7168, 2048, 1, 1),
    "pair 256×4096×7168": (256, 4096, 7168, 1, 2),
    "pair 512×4096×7168": (512, 4096, 7168, 1, 2),
    "pair 256×3072×4096": (256, 3072, 4096, 1, 2),
    "pair 512×3072×7168": (512, 3072, 7168, 1, 2),
    "qkv, 1 token": (1, 6144, 4096, 1, 1),
    "gate and up, 1 token": (1, 14336, 4096, 1, 2),
    "down, 1 token": (1, 4096, 14336, 1, 1),
    "qkv, 8192 tokens": (8192, 6144, 4096, 1, 1),
    "gate and up, 8192 tokens": (8192, 14336, 4096, 1, 2),
    "down, 8192 tokens": (8192, 4096, 14336, 1, 1),
}
BYTES = 0.5 + 1 / 16  # per NVFP4 element, with its share of the scale
CYCLES_PER_US = 1850  # cycles, at the model's clock


@dataclass(frozen=True)
class Part:
    """Part of a product that one cluster computes.

    Attributes:
        clusters: number of clusters that work at the same time.
        tiles: number of tiles of the busiest cluster, laid side by side along the weights.
    """

    clusters: int
    tiles: int


def part_of(problem: "Problem", tile: tuple[int, int], cluster: int, swap_ab: bool = False) -> Part:
    """Part of ``problem`` for a cluster of ``cluster`` CTAs; ``swap_ab``: rows are weights."""
    from nvfp4_kernels.devices import assumed_clusters
    from nvfp4_kernels.sm100.limits import SMS

    rows, columns = (problem.n, problem.m) if swap_ab else (problem.m, problem.n)
    total = math.ceil(rows / tile[0]) * math.ceil(columns / tile[1]) * problem.batch
    clusters = min(total, assumed_clusters(SMS, cluster))
    return Part(clusters, math.ceil(total / clusters))


class Modeller:
    """Process-wide emulator that runs one cluster of a product and models the whole grid."""

    def __init__(self) -> None:
        os.environ["NVFP4_KERNELS_CACHE"] = ""
        self._gpu = TimedGpu()
        shim.install(self._gpu)
        import torch

        torch.set_num_threads(1)

    def time(self, problem: "Problem", tile: "Tile", output: "EpilogueConfig") -> Timing:
        """Time of ``problem`` with ``tile``, without launch overhead."""
        from nvfp4_kernels.gemm.sm100.kernel import BlockScaledGemm, GemmArguments
        from nvfp4_kernels.runtime.compile import launch

        down = tile.rows * max(1, tile.cluster_m // tile.ctas)
        across = tile.columns * tile.cluster_n
        part = part_of(problem, (down, across), tile.cluster, tile.swap_ab)
        if tile.swap_ab:
            m, n = min(problem.m, across), part.tiles * down
        else:
            m, n = min(problem.m, down), part.tiles * across

        moved = operand_bytes(problem)
        found: list[Timing] = []

        def finished(launched: Launch) -> None:
            found.append(model(launched, clusters=part.clusters, footprint=moved))

        self._gpu.finished = finished
        arguments = self._arguments(m, n, problem, tile.terms)
        sizes = (m, n, problem.k, 1, 1, 1)
        bundle = GemmArguments(*arguments, *sizes, defective_below=0, shard_ends=(0,) * 7)
        launch(BlockScaledGemm(tile, output), bundle)
        self._gpu.memory.clear()
        return found[0]

    def _arguments(self, m: int, n: int, problem: "Problem", terms: "TermLayout") -> list[object]:
        """Launch arguments filled with zeros, as the time does not depend on values."""
        import torch

        from nvfp4_kernels.formats.terms import ONE_TERM, data_shape

        def operand(rows: int, terms: "TermLayout" = ONE_TERM) -> list[torch.Tensor]:
            data = torch.zeros(data_shape((), rows, problem.k, terms.count), dtype=torch.uint8)
            scales = torch.zeros(scales_of_part(rows, problem.k, terms), dtype=torch.uint8)
            return [data, scales]

        x, w1 = operand(m, terms), operand(n)
        w2 = operand(n) if problem.weights == 2 else w1
        out = torch.zeros(m, n, dtype=torch.bfloat16)
        alpha = torch.ones(2)
        unique = {t.data_ptr(): t for t in (*x, *w1, *w2, out, alpha)}
        for address, tensor in unique.items():
            self._gpu.memory.register(address, tensor.nbytes, keep=tensor)
        return [*x, *w1, *w2, out, None, None, alpha, None, None, None]


def scales_of_part(rows: int, k: int, terms: "TermLayout") -> tuple[int, ...]:
    """Shape of the scales of ``rows`` rows of an operand whose terms have the layout ``terms``.

    So few rows that the terms could share an atom may be a part of an operand of more rows.
    """
    from nvfp4_kernels.formats.terms import PACKED_ROWS, scales_shape

    return scales_shape((), rows if terms.packed else max(rows, PACKED_ROWS + 1), k, terms.count)


def operand_bytes(problem: "Problem") -> float:
    """Bytes of the operands, each read once."""
    rows = problem.weights * problem.n + problem.terms * problem.m
    return problem.batch * rows * problem.k * BYTES


def report(modeller: Modeller, name: str, shape: tuple[int, ...], every: bool, terms: int) -> None:
    """Print a line for the chosen tile, or for every tile that fits."""
    from nvfp4_kernels.gemm.sm100.choose import Problem, candidates, choose_config, estimate
    from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig

    problem, output = Problem(*shape, terms=terms), EpilogueConfig("bfloat16")
    results = problem.batch * problem.m * problem.n
    flops = 2.0 * results * problem.k * problem.weights * problem.terms
    least = speed_of_light(flops, operand_bytes(problem), 2.0 * results)
    tiles = candidates(problem, output) if every else [choose_config(problem, output)]
    timed = [(modeller.time(problem, tile, out), tile, out) for tile, out in tiles]
    for timing, tile, out in sorted(timed, key=lambda row: row[0].cycles):
        unit, share = timing.limit
        reached = least.microseconds / timing.microseconds
        estimated = estimate(problem, tile) / CYCLES_PER_US
        print(
            f"{name:25} {timing.microseconds:7.2f} us, least {least.microseconds:7.2f} "
            f"({reached:4.0%}), estimated {estimated:7.2f}; {unit} {share:.0%}; {tile} {out.store}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", nargs="+", help="M,N,K[,batch[,weights]]")
    parser.add_argument("--all", action="store_true", help="every tile that fits")
    parser.add_argument("--terms", type=int, default=1, help="of the activations")
    given = parser.parse_args()
    shapes: dict[str, tuple[int, ...]] = dict(SHAPES)
    if given.shape:
        shapes = {text: tuple(int(x) for x in text.split(",")) for text in given.shape}
    modeller = Modeller()
    for name, shape in shapes.items():
        report(modeller, name, shape, given.all, given.terms)


if __name__ == "__main__":
    main()
