"""Modelled time of the attention kernel on a B200, against the roofline.

    python -m tests.modelled.attention                      prefill and decode of a Llama 8B's heads

CTAs of a few lengths run in the emulator, and the time model (``tests/emulator/timing``) gives
their times: a work tile takes a constant time plus a constant per key tile. Prefill schedules these
times, longest first, on the SMs of the chip. Decode simulates all CTAs of the grid, each with one
work tile, as they share HBM; CTAs with several work tiles are modelled in ``decoder_layer``.
Nothing here was measured on a B200; launch times are left out.
"""

import heapq
import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from unittest.mock import patch

from tests.emulator.machine.launch import Launch
from tests.emulator.runtime import shim
from tests.emulator.timing import Timing, model
from tests.emulator.timing.device import TimedGpu

if TYPE_CHECKING:
    from torch import Tensor

    from nvfp4_kernels.attention.sm100.choose import AttentionProblem
    from nvfp4_kernels.attention.sm100.kernel import AttentionArguments
    from nvfp4_kernels.attention.sm100.tile import AttentionTile, Variant

CLOCK = 1.85e9
SMS = 148
FLOPS = {False: 2.25e15, True: 4.5e15}  # dense, of 16-bit and of E4M3 operands
BYTES = 8e12  # per second
INDEXED_OF = 4  # keys of a sequence per top-k index
WORKS = 5  # work tiles of one CTA in a trace
LINE = (
    "{name:34} {us:9.1f} us, roofline {bound:9.1f} ({fraction:4.0%}) {rate}; {tile}, "
    "{splits} splits"
)


@dataclass(frozen=True)
class Shape:
    """Batch of equally long sequences; ``indexed``: tokens attend to ``keys`` top-k indices."""

    batch: int
    queries: int
    keys: int
    head_dim: int
    fp8: bool = False
    kv_heads: int = 8
    group: int = 4
    indexed: bool = False

    def problem(self) -> "AttentionProblem":
        from nvfp4_kernels.attention.sm100.choose import AttentionProblem

        return AttentionProblem(
            self.batch, self.queries, self.keys, self.kv_heads, self.group, self.head_dim, self.fp8,
            indexed=self.indexed,
        )  # fmt: skip


SHAPES = {
    f"{name}, D = {head_dim}{', fp8' if fp8 else ''}": Shape(batch, queries, keys, head_dim, fp8)
    for head_dim in (64, 128)
    for fp8 in (False, True)
    for name, batch, queries, keys in (
        ("prefill 4096", 1, 4096, 4096),
        ("prefill 16384", 1, 16384, 16384),
        ("decode 64 × 4096", 64, 1, 4096),
        ("decode 4 × 16384", 4, 1, 16384),
        ("decode 1 × 131072", 1, 1, 131072),
    )
} | {
    f"{tokens} × 2048 listed, D = 128{', fp8' if fp8 else ''}": Shape(
        tokens, 1, 2048, 128, fp8, kv_heads=1, group=64, indexed=True
    )
    for fp8 in (False, True)
    for tokens in (1, 32, 256, 2048)
}


class Modeller:
    """Process-wide emulator that runs CTAs of attention."""

    def __init__(self) -> None:
        os.environ["NVFP4_KERNELS_CACHE"] = ""
        self._gpu = TimedGpu()
        shim.install(self._gpu)
        import torch

        torch.set_num_threads(1)

    def run(
        self, tile: "AttentionTile", shape: Shape, split: bool, clusters: int | None = None
    ) -> Timing:
        """Model one KV head of one paged sequence, if ``clusters`` clusters share the chip."""
        from nvfp4_kernels.attention.sm100.kernel import FmhaSm100
        from nvfp4_kernels.runtime.compile import launch

        variant, arguments, tensors = one_head(shape, 1 if split else 0)
        for tensor in tensors:
            self._gpu.memory.register(tensor.data_ptr(), tensor.nbytes, keep=tensor)
        size = 1 if shape.fp8 else 2
        found: list[Timing] = []

        def finished(launched: Launch) -> None:
            if clusters is None:
                found.append(model(launched))
            else:
                moved = float(clusters * shape.keys * 2 * shape.head_dim * size)
                found.append(model(launched, clusters=clusters, footprint=moved, exact=True))

        self._gpu.finished = finished
        launch(FmhaSm100(tile, variant), arguments)
        self._gpu.memory.clear()
        return found[0]


def one_head(shape: Shape, splits: int) -> "tuple[Variant, AttentionArguments, tuple[Tensor, ...]]":
    """Arguments of a launch on one KV head of one paged sequence.

    Args:
        shape: shape of the sequences.
        splits: number of CTAs that share the keys and write splits; 0: one CTA writes the result.

    Returns:
        The kernel's variant, its arguments, and their tensors: queries, cache, and others.
    """
    import torch

    from nvfp4_kernels.attention.merge.sm100 import scale_arguments
    from nvfp4_kernels.attention.sm100.epilogue import AttentionResult
    from nvfp4_kernels.attention.sm100.kernel import AttentionArguments
    from nvfp4_kernels.attention.sm100.launch import NO_MERGE, NO_ROTATION
    from nvfp4_kernels.attention.sm100.operands import Strides
    from nvfp4_kernels.attention.sm100.queries import Queries
    from nvfp4_kernels.attention.sm100.scheduler import SequenceLengths, Sizes
    from nvfp4_kernels.attention.sm100.tile import Layout, Variant

    page = 16
    stored = INDEXED_OF * shape.keys if shape.indexed else shape.keys
    pages = -(-stored // page)
    heads, head_dim = shape.group, shape.head_dim
    q = torch.zeros(shape.queries, heads, head_dim, dtype=torch.bfloat16)
    dtype = torch.float8_e4m3fn if shape.fp8 else torch.bfloat16
    cache = torch.zeros(pages, 1, page, 2 * head_dim, dtype=torch.float32).to(dtype)
    table = torch.randperm(pages, dtype=torch.int32).unsqueeze(0)
    listed = torch.randperm(stored, dtype=torch.int32)[: shape.keys].unsqueeze(0)
    parts = (splits,) if splits else ()
    out = torch.empty(*parts, *q.shape, dtype=torch.float32 if splits else torch.bfloat16)
    lse, one = torch.empty(*parts, *q.shape[:-1]), torch.ones(())
    lens = torch.tensor([shape.keys], dtype=torch.int32)
    starts = torch.tensor([0, shape.queries], dtype=torch.int32)
    layout: Layout = "indexed" if shape.indexed else "paged"
    variant = Variant(layout=layout, page_size=page, causal=not shape.indexed, split=splits > 0)
    scale = one if shape.fp8 else None
    strides = Strides(row=cache.stride(2), head=cache.stride(1), page=cache.stride(0))
    arguments = AttentionArguments(
        queries=Queries(q, batch_stride=0, token_stride=q.stride(0), head_stride=q.stride(1)),
        k=cache,
        v=cache[..., head_dim:],
        k_strides=strides,
        v_strides=strides,
        map_stride=2 * head_dim,
        map_rows=pages * page,
        result=AttentionResult(
            out, lse, sinks=None, rows=shape.queries, num_heads=heads, **scale_arguments(None)
        ),
        lengths=SequenceLengths(starts, key_start=None, seq_lens=lens),
        block_table=table,
        table_stride=pages,
        indices=listed,
        list_stride=shape.keys,
        scale=0.1,
        soft_cap=0.0,
        k_scale=scale,
        v_scale=scale,
        merge=NO_MERGE,
        counters=None,
        rotation=NO_ROTATION,
        sizes=Sizes(
            batch=1,
            queries=shape.queries,
            keys=shape.keys if shape.indexed else page,
            pages=pages,
            kv_heads=1,
            group=heads,
            splits=max(1, splits),
            window=0,
            max_resident_ctas=SMS,
        ),
        defective_below=0,
    )
    return variant, arguments, (q, cache, table, listed, out, lse, one, lens, starts)


def prefill(modeller: Modeller, tile: "AttentionTile", shape: Shape) -> float:
    """Seconds that work tiles of every length take, longest first, each on the first free SM."""
    tokens = tile.rows // shape.group

    def cycles(works: int, tiles: int) -> float:
        taken = replace(shape, queries=works * tokens, keys=128 * tiles)
        with patch.object(Launch, "resident_clusters", property(lambda _: 1)):
            return modeller.run(tile, taken, split=False).cycles

    few, many = cycles(1, 8), cycles(1, 12)
    each = (many - few) / 4
    start, fixed = 0.0, few - 8 * each
    if tile.uses_clc:  # one CTA has all tiles; later tiles follow the first
        lengths = [math.ceil(12 - n * tokens / 128) for n in range(WORKS)]
        fixed = (cycles(WORKS, 12) - many - each * sum(lengths[1:])) / (WORKS - 1)
        start = few - 8 * each - fixed
    blocks = range(math.ceil(shape.queries / tokens), 0, -1)
    before = shape.keys - shape.queries
    lengths = [math.ceil((before + min(n * tokens, shape.queries)) / 128) for n in blocks]
    free = [start] * SMS
    for length in lengths:
        for _ in range(shape.batch * shape.kv_heads):
            heapq.heapreplace(free, free[0] + fixed + length * each)
    return max(free) / CLOCK


def decode(modeller: Modeller, tile: "AttentionTile", shape: Shape, splits: int) -> float:
    """Seconds of decode, without the merge of splits."""
    keys = 128 * math.ceil(math.ceil(shape.keys / 128) / splits)
    clusters = shape.batch * shape.kv_heads * splits
    timing = modeller.run(tile, replace(shape, keys=keys), splits > 1, clusters)
    return timing.microseconds * 1e-6


def report(modeller: Modeller, name: str, shape: Shape) -> None:
    from nvfp4_kernels.attention.sm100.choose import choose_config

    tile, splits = choose_config(shape.problem())
    heads = shape.batch * shape.kv_heads
    moved = 2 * heads * shape.keys * shape.head_dim * (1 if shape.fp8 else 2)
    pairs = shape.queries * shape.keys - shape.queries**2 / 2
    flops = 4 * heads * shape.group * pairs * shape.head_dim
    bound = max(moved / BYTES, flops / FLOPS[shape.fp8])
    if shape.queries > 1:
        seconds = prefill(modeller, tile, shape)
        rate = f"{flops / seconds / 1e12:.0f} TFLOP/s"
    else:
        seconds = decode(modeller, tile, shape, splits)
        rate = f"{moved / seconds / 1e12:.2f} TB/s"
    us, bound = seconds * 1e6, bound * 1e6
    fraction = bound / us
    print(LINE.format(**locals()), flush=True)


def main() -> None:
    modeller = Modeller()
    for name, shape in SHAPES.items():
        report(modeller, name, shape)


if __name__ == "__main__":
    main()
