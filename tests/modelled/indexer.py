"""Modelled time of the indexer's scoring kernel on a B200, against lower bounds.

    python -m tests.modelled.indexer              decode and prefill of DeepSeek's indexer, 64 heads
    python -m tests.modelled.indexer nvfp4        of one format

Launches with a few key tiles per CTA run in the emulator, and the time model
(``tests/emulator/timing``) gives their times with a full grid that shares the chip: a launch takes
a constant time plus a constant per key tile, from which the time of all its key tiles follows.
Nothing here was measured on a B200; launch times are left out.
"""

import heapq
import math
import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.emulator.machine.launch import Launch
from tests.emulator.runtime import shim
from tests.emulator.timing import Timing, model
from tests.emulator.timing.device import TimedGpu

if TYPE_CHECKING:
    from nvfp4_kernels.indexer.sm100.choose import ScoreProblem
    from nvfp4_kernels.indexer.sm100.tile import Format, ScoreTile

CLOCK = 1.85e9
SMS = 148
BYTES = 8e12  # per second
FLOPS = {"nvfp4": 9e15, "mxfp4": 9e15, "fp8": 4.5e15, "bf16": 2.25e15}  # dense
ALU_LANES, ISSUED_LANES = 64, 128  # per cycle of an SM
KEYS, PAGE = 128, 64
FEW, MANY = 24, 40  # key tiles of a CTA
REGISTERS = 128  # per thread, or more: one CTA per SM


@dataclass(frozen=True)
class Shape:
    """Batch of equally long sequences; their last ``queries`` tokens are the queries (causal)."""

    fmt: "Format"
    sequences: int
    queries: int
    keys: int
    heads: int = 64
    head_dim: int = 128

    def problem(self) -> "ScoreProblem":
        from nvfp4_kernels.indexer.sm100.choose import ScoreProblem

        return ScoreProblem(
            self.fmt, self.head_dim, self.heads, self.sequences, self.queries, self.keys
        )

    @property
    def prefill(self) -> bool:
        return self.queries > 8

    @property
    def pairs(self) -> float:
        """Number of pairs of a query and a visible key."""
        return self.sequences * self.queries * (self.keys - self.queries / 2)

    def key_bytes(self) -> int:
        from nvfp4_kernels.indexer.formats import format_of

        fmt = format_of(self.fmt)
        return fmt.data_bytes(self.head_dim) + fmt.scale_bytes(self.head_dim)

    def limits(self) -> dict[str, float]:
        """Lower bounds in seconds, for: moved bytes, products, relu, and relu with its FMA.

        relu takes one ALU slot per product; the ALU has half of the issue rate. An FMA serves two
        heads, so relu and FMA together take 1.5 issue slots per product, on any pipe.
        """
        moved = self.sequences * self.keys * self.key_bytes() + 4 * self.pairs
        elements = self.pairs * self.heads
        return {
            "memory": moved / BYTES,
            "tensor": 2 * elements * self.head_dim / FLOPS[self.fmt],
            "ALU": elements / (ALU_LANES * SMS * CLOCK),
            "issue": 1.5 * elements / (ISSUED_LANES * SMS * CLOCK),
        }


SHAPES = {
    "decode 64 × 128K": (64, 1, 131072),
    "decode 64 × 2 of 128K": (64, 2, 131072),
    "decode 1 × 128K": (1, 1, 131072),
    "decode 64 × 8K": (64, 1, 8192),
    "prefill 4096 of 32K": (1, 4096, 32768),
    "prefill 4096": (1, 4096, 4096),
}


class Modeller:
    """Time model of CTAs; constructing it installs the process-wide emulator."""

    def __init__(self) -> None:
        os.environ["NVFP4_KERNELS_CACHE"] = ""
        self._gpu = TimedGpu()
        shim.install(self._gpu)
        import torch

        torch.set_num_threads(1)

    def run(self, tile: "ScoreTile", shape: Shape, clusters: int, shared: bool) -> Timing:
        """Time one CTA on pages; ``clusters`` CTAs share the chip and, if ``shared``, the keys."""
        import torch

        from nvfp4_kernels.indexer.formats import format_of
        from nvfp4_kernels.indexer.sm100.kernel import (
            IndexerLogitsSm100,
            LogitsArguments,
            ScoreArguments,
        )
        from nvfp4_kernels.indexer.sm100.operands import PageTable
        from nvfp4_kernels.indexer.sm100.scheduler import KeyRanges, Sizes
        from nvfp4_kernels.indexer.sm100.variant import Variant
        from nvfp4_kernels.indexer.sm100.weights import HeadWeights
        from nvfp4_kernels.runtime.compile import launch

        fmt, pages = format_of(shape.fmt), -(-shape.keys // PAGE)
        q, *scales = fmt.empty(torch.empty(0), (shape.queries, shape.heads), shape.head_dim)
        cache = torch.zeros(pages, fmt.page_bytes(shape.head_dim, PAGE), dtype=torch.uint8)
        weights = torch.zeros(shape.queries, shape.heads)
        table = torch.randperm(pages, dtype=torch.int32).unsqueeze(0)
        ends = torch.full((shape.queries,), shape.keys, dtype=torch.int32)
        out = torch.empty(shape.queries, shape.keys)
        tensors = [q, *scales, cache, weights, table, ends, out]
        for tensor in tensors:
            self._gpu.memory.register(tensor.data_ptr(), tensor.nbytes, keep=tensor)
        found: list[Timing] = []

        def finished(launched: Launch) -> None:
            moved = float(cache.nbytes if shared else clusters * cache.nbytes)
            found.append(model(launched, clusters=clusters, footprint=moved, registers=REGISTERS))

        self._gpu.finished = finished
        fp8 = shape.fmt == "fp8"
        factors = scales[0] if scales else None
        inputs = ScoreArguments(
            q=q,
            k=cache,
            q_scales=None if fp8 else factors,
            page_table=PageTable(
                table=table,
                table_stride=pages,
                pages=pages,
                stride=cache.stride(0),
                k_scales=cache[:, PAGE * fmt.data_bytes(shape.head_dim) :],
            ),
            weights=HeadWeights(weights=weights, query_factors=factors if fp8 else None),
            ranges=KeyRanges(begins=None, ends=ends),
            sizes=Sizes(sequences=1, queries=shape.queries, keys=shape.keys, splits=1),
            defective_below=0,
        )
        kernel = IndexerLogitsSm100(tile, Variant(PAGE, query_factors=fp8))
        launch(kernel, LogitsArguments(inputs=inputs, out=out))
        self._gpu.memory.clear()
        return found[0]

    def line(self, tile: "ScoreTile", shape: Shape, clusters: int) -> tuple[float, float]:
        """Cycles of a launch without key tiles, and cycles per key tile of its CTAs."""
        queries = min(shape.queries, tile.queries)
        few, many = (
            self.run(tile, replace(shape, queries=queries, keys=KEYS * n), clusters, shape.prefill)
            for n in (FEW, MANY)
        )
        each = (many.cycles - few.cycles) / (MANY - FEW)
        return few.cycles - FEW * each, each


def prefill(fixed: float, each: float, tile: "ScoreTile", shape: Shape, splits: int) -> float:
    """Seconds that CTAs of every length take, longest first, each on the first free SM.

    ``fixed``, ``each``: cycles from ``Modeller.line``.
    """
    free = [0.0] * SMS
    for block in range(math.ceil(shape.queries / tile.queries), 0, -1):
        last = min(block * tile.queries, shape.queries)
        tiles = math.ceil((shape.keys - shape.queries + last) / KEYS)
        for _ in range(shape.sequences * splits):
            heapq.heapreplace(free, free[0] + fixed + math.ceil(tiles / splits) * each)
    return max(free) / CLOCK


def report(modeller: Modeller, name: str, shape: Shape) -> None:
    from nvfp4_kernels.indexer.sm100.choose import choose_config

    tile, splits = choose_config(shape.problem())
    ctas = shape.sequences * math.ceil(shape.queries / tile.queries) * splits
    if shape.prefill:
        fixed, each = modeller.line(tile, shape, SMS)
        seconds = prefill(fixed, each, tile, shape, splits)
    else:
        fixed, each = modeller.line(tile, shape, ctas)
        tiles = math.ceil(math.ceil(shape.keys / KEYS) / splits)
        seconds = (fixed + tiles * each) / CLOCK
    limits = ", ".join(f"{unit} {1e6 * least:.1f}" for unit, least in shape.limits().items())
    queries = f"{tile.group_queries}×{tile.groups} queries"
    words = f"{queries}, ping-pong sets: {tile.pingpong}, splits: {splits}"
    print(
        f"{shape.fmt:6} {name:22} {1e6 * seconds:9.1f} us, least: {limits}; {words}, "
        f"{ctas} CTAs of {fixed:.0f} + {each:.0f} cycles per tile",
        flush=True,
    )


def main() -> None:
    modeller = Modeller()
    formats = sys.argv[1:] or ["nvfp4", "mxfp4", "fp8", "bf16"]
    for fmt in formats:
        for name, sizes in SHAPES.items():
            report(modeller, name, Shape(fmt, *sizes))


if __name__ == "__main__":
    main()
