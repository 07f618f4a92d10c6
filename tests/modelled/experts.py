"""The modelled time of a mixture of experts on a B200, one layer after the other.

    python -m tests.modelled.experts                        the models below, 1 to 1024 tokens
    python -m tests.modelled.experts --model qwen3-30b --tokens 64 --all     every tile
    python -m tests.modelled.experts --contest              a contest's grouped products

A batch's tokens choose experts at random, each with equal probability. Modelled are both products
alone, in a chain, and in a chain with dispatch, quantisation and combine; then with the second
product's weights prefetched while the first product ends. Two clusters of each product run in the
emulator, the first with as many tiles as the busiest cluster of the grid, the second with one tile
less; the time model (``tests/emulator/timing``) builds the grid from them, in proportion. Nothing
here was measured on a B200.
"""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.emulator.timing import B200_TIMING, chain
from tests.modelled.experts_rows import RowsSm100
from tests.modelled.experts_shape import MODELS, TOKENS, Shape
from tests.modelled.layer import layers
from tests.modelled.traces import Traced, Tracer, operand

if TYPE_CHECKING:
    from nvfp4_kernels.gemm.sm100.choose_grouped import GroupedProblem
    from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile

    Config = tuple[Tile, EpilogueConfig]

BYTES = 0.5 + 1 / 16  # per NVFP4 element, with its share of the scale
LAYERS = 3  # in a chain: the first has no predecessor to overlap
FLOP_PER_US = 9.0e9


# Tokens of each expert, N and K; lower bound of the time at 8 TB/s and 1.5 GHz.
CONTEST = {
    "8 experts, 4096 × 7168": ((80, 176, 128, 72, 64, 248, 96, 160), 4096, 7168, 18.833),
    "8 experts, 7168 × 2048": ((40, 76, 168, 72, 164, 148, 196, 160), 7168, 2048, 10.667),
    "2 experts, 3072 × 4096": ((192, 320), 3072, 4096, 2.406),
    "2 experts, 4096 × 1536": ((128, 384), 4096, 1536, 1.525),
}


@dataclass(frozen=True)
class Product:
    """One grouped product of a batch.

    Attributes:
        name: name of the weights.
        counts: number of tokens of each expert that has tokens.
        tile_tokens: number of rows of a tile.
        n, k, weights: sizes and number of each expert's weights.
        tiles, experts: number of token tiles with allocated memory, and of experts on this rank.
    """

    name: str
    counts: tuple[int, ...]
    tile_tokens: int
    n: int
    k: int
    weights: int
    tiles: int
    experts: int

    @property
    def used(self) -> int:
        """Number of used token tiles."""
        return sum(math.ceil(count / self.tile_tokens) for count in self.counts)

    @property
    def problem(self) -> "GroupedProblem":
        from nvfp4_kernels.gemm.sm100.choose_grouped import GroupedProblem

        return GroupedProblem(
            self.tile_tokens, self.n, self.k, self.tiles, self.experts, self.weights
        )


class GroupedSm100:
    """Traced launches of grouped products; a traced launch is not run again."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._known: dict[object, Traced] = {}

    def traced(self, product: Product, config: "Config", read: str, written: str) -> Traced:
        """Traced launch with a tile, from an operand ``read`` to an operand ``written``."""
        key = product, config, read, written
        if key not in self._known:
            self._known[key] = self._run(product, *config, read, written)
        return self._known[key]

    def _run(
        self, product: Product, tile: "Tile", output: "EpilogueConfig", read: str, written: str
    ) -> Traced:
        import torch

        from nvfp4_kernels.devices import assumed_clusters
        from nvfp4_kernels.formats.terms import data_shape, scales_shape
        from nvfp4_kernels.gemm.sm100.kernel import BlockScaledGemm, GemmArguments
        from nvfp4_kernels.runtime.compile import launch
        from nvfp4_kernels.sm100.limits import SMS

        tokens, n, k, weights = product.tile_tokens, product.n, product.k, product.weights
        down = tile.rows * max(1, tile.cluster_m // tile.ctas)
        across = tile.columns * tile.cluster_n
        # Extents of a cluster's tile: along the weights' rows, and along the tokens.
        along, beside = (down, across) if tile.swap_ab else (across, down)
        each = math.ceil(n / along) * math.ceil(tokens / beside)
        slots = assumed_clusters(SMS, tile.cluster)
        clusters = min(each * product.tiles, slots)
        turns, extra = divmod(each * product.used, clusters)
        rows = min(tokens, beside)
        part = (2 * turns + bool(extra)) * along  # of two clusters, or one of twice the tiles
        groups = torch.tensor([1 if part else 0, 0, 0], dtype=torch.int32)

        def packed(batch: tuple[int, ...], height: int) -> list[torch.Tensor]:
            data = torch.zeros(data_shape(batch, height, k, 1), dtype=torch.uint8)
            return [data, torch.zeros(scales_shape(batch, height, k, 1), dtype=torch.uint8)]

        x, w = packed((2,), rows), packed((weights,), max(part, along))
        quantized = output.dtype == "nvfp4"
        width = max(part, along)
        out = torch.zeros(2, rows, width // 2 if quantized else width, dtype=torch.uint8)
        if not quantized:
            out = torch.zeros(2, rows, width, dtype=getattr(torch, output.dtype))
        out_scales = torch.zeros(scales_shape((2,), rows, width, 1), dtype=torch.uint8)
        arguments = GemmArguments(
            x=x[0],
            sfx=x[1],
            w1=w[0],
            sfw1=w[1],
            w2=None,
            sfw2=None,
            out=out,
            sf_out=out_scales if quantized else None,
            out_scale=torch.ones(1) if quantized else None,
            alpha=torch.ones(2),
            row_scale=None,
            bias=None,
            groups=groups,
            m=rows,
            n=width,
            k=k,
            batch=2,
            weight_batch=weights,
            clusters=2,
            defective_below=0,
            shard_ends=(0,) * 7,
        )
        launched, registers = self.tracer.run(
            lambda: launch(BlockScaledGemm(tile, output), arguments)
        )
        moved = float(len(product.counts) * weights * n * k)
        copied = float(product.used * tokens * k)
        operands = (
            operand(read, x[0], copied / 2),
            operand(f"{read} scales", x[1], product.used * k * max(128, tokens) / 16),
            operand(f"{product.name}", w[0], moved / 2),
            operand(f"{product.name} scales", w[1], moved / 16),
        )
        results = float(product.used * tokens * n)
        writes = {written: results / 2 if quantized else 2 * results}
        if quantized:
            writes[f"{written} scales"] = product.used * n * max(128, tokens) / 16
        return Traced(launched, clusters, operands, writes, registers, _proportion(extra, clusters))


def _proportion(extra: int, clusters: int) -> tuple[int, ...]:
    """Repeats of clusters 0 and 1 in proportion: ``extra`` of ``clusters`` are cluster 0.

    Cluster 0 has one tile more than cluster 1.
    """
    if extra == 0:
        return (0,)
    ones = max(1, round(clusters / extra))
    if ones > 1 or extra == clusters:
        return (0, *[1] * (ones - 1))
    few = max(1, round(clusters / (clusters - extra)))
    return (*[0] * (few - 1), 1)


def products(shape: Shape, tokens: int, tile_tokens: int) -> list[Product]:
    """Both products of a layer."""
    from nvfp4_kernels.moe.routing import max_tiles

    counts = tuple(shape.counts(shape.ids(tokens)))
    tiles = int(max_tiles(tokens * shape.top_k, shape.local, tile_tokens))
    sizes = ("gate and up", shape.intermediate, shape.hidden, 2), (
        "down", shape.hidden, shape.intermediate, 1,
    )  # fmt: skip
    return [
        Product(name, counts, tile_tokens, n, k, weights, tiles, shape.local)
        for name, n, k, weights in sizes
    ]


def least(given: Sequence[Product]) -> float:
    """Microseconds of the weights at 8 TB/s, or of the products at 9 PFLOP/s if longer."""
    moved = sum(len(p.counts) * p.weights * p.n * p.k * BYTES for p in given)
    flop = sum(2.0 * sum(p.counts) * p.weights * p.n * p.k for p in given)
    return max(moved / 8e6, flop / FLOP_PER_US)


def alone(traced: Traced) -> float:
    """Microseconds of one launch alone, including the tail of its last clusters."""
    return chain(layers([traced], 1), B200_TIMING).microseconds


def in_chain(launches: Sequence[Traced]) -> float:
    """Microseconds of a layer's launches that follow the launches of a preceding layer."""
    return chain(layers(launches, LAYERS), B200_TIMING).period(len(launches))


def report(
    grouped: GroupedSm100, name: str, shape: Shape, tokens: int, every: bool, only_chain: bool
) -> None:
    """Print a layer's products at one number of tokens, with the chosen tile or with every tile."""
    from nvfp4_kernels.gemm.sm100.choose_grouped import (
        choose_grouped,
        choose_tile_tokens,
        grouped_candidates,
    )
    from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig
    from nvfp4_kernels.moe.routing import TILE_TOKENS

    chosen = choose_tile_tokens(
        tokens, shape.top_k, shape.local, shape.experts, shape.intermediate, shape.hidden
    )
    outputs = EpilogueConfig("nvfp4"), EpilogueConfig("bfloat16")
    names = ("x", "h", "y")
    for tile_tokens in TILE_TOKENS if every else (chosen,):
        start = time.monotonic()
        given = products(shape, tokens, tile_tokens)
        picked = []
        for number, (product, output) in enumerate(zip(given, outputs, strict=True)):
            best = choose_grouped(product.problem, output)
            configs = grouped_candidates(product.problem, output) if every else [best]
            for config in configs:
                traced = grouped.traced(product, config, names[number], names[number + 1])
                mark = "*" if config == best else " "
                us = math.nan if only_chain else alone(traced)
                if every:
                    print(f"  {mark} {product.name} {us:7.2f} µs {config[0]} {config[1].store}")
                if config == best:
                    picked.append((us, traced))
        times = ", ".join(f"{us:.2f}" for us, _ in picked)
        multiplied = [traced for _, traced in picked]
        together = in_chain(multiplied)
        rows = RowsSm100(grouped.tracer, shape, tokens, tile_tokens)
        before, after = (
            rows.after_topk("hidden", "x"),
            [rows.combine("y", "hidden")],
        )
        whole = in_chain([*before, *multiplied, *after])
        whole_early = math.nan
        if not only_chain:
            tile, output = choose_grouped(given[1].problem, outputs[1])
            early = grouped.traced(given[1], (replace(tile, routed_before=True), output), "h", "y")
            whole_early = in_chain([*before, multiplied[0], early, *after])
        print(
            f"{name}, {tokens} tokens, {len(given[0].counts)} experts, tiles of {tile_tokens}"
            f"{'*' if tile_tokens == chosen else ''}: {times}; in a chain {together:.1f}, "
            f"layer {whole:.1f}, with early weights {whole_early:.1f}, "
            f"least {least(given):.1f} [{time.monotonic() - start:.0f} s]",
            flush=True,
        )


def contest(grouped: GroupedSm100, every: bool) -> None:
    """Print the contest's products, and their geometric mean."""
    from nvfp4_kernels.gemm.sm100.choose_grouped import choose_grouped, grouped_candidates
    from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig
    from nvfp4_kernels.moe.routing import TILE_TOKENS, max_tiles

    logs = []
    for name, (counts, n, k, limit) in CONTEST.items():
        found = []
        for tile_tokens in TILE_TOKENS[3:]:
            tiles = int(max_tiles(sum(counts), len(counts), tile_tokens))
            product = Product("w", counts, tile_tokens, n, k, 1, tiles, len(counts))
            configs = [choose_grouped(product.problem, EpilogueConfig("float16"))]
            if every:
                configs = grouped_candidates(product.problem, EpilogueConfig("float16"))
            for config in configs:
                us = alone(grouped.traced(product, config, "x", "y"))
                found.append((us, tile_tokens, config[0]))
                print(f"  {name}: {us:.2f} µs, tiles of {tile_tokens} tokens, {config[0]}")
        us, tile_tokens, tile = min(found, key=lambda each: each[0])
        logs.append(math.log(us))
        print(f"{name}: {us:.2f} µs of {limit}, tiles of {tile_tokens} tokens, {tile}", flush=True)
    print(f"geometric mean {math.exp(sum(logs) / len(logs)):.2f} µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--all", action="store_true", help="every tile that fits")
    parser.add_argument("--contest", action="store_true", help="a contest's grouped products")
    parser.add_argument("--only-chain", action="store_true", help="nothing alone nor early")
    given = parser.parse_args()
    grouped = GroupedSm100(Tracer("sm_100"))
    if given.contest:
        contest(grouped, given.all)
        return
    for name in given.model:
        for tokens in given.tokens:
            report(grouped, name, MODELS[name], tokens, given.all, given.only_chain)


if __name__ == "__main__":
    main()
