"""Benchmark of a decoder layer's kernels in sequence on a Hopper GPU, also with other tiles.

    python -m examples.kernel_bench.layer
    python -m examples.kernel_bench.layer --tokens 1 --sweep o_proj down_proj
    python -m examples.kernel_bench.layer --model llama-70b-tp4

Benchmarked alone, a GEMM cannot prefetch weights while its predecessor ends: the fastest tile of
such a benchmark need not be the fastest in a layer. Here the layers of a Llama, each with its own
weights and caches, are captured as one CUDA graph per tile; graphs replay in turn, and medians are
printed. A layer of llama-70b-tp4 is the work of one of four GPUs, without communication.
"""

import argparse
import itertools
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from examples.command_line import refusals
from examples.kernel_bench.machine import cuda_device
from examples.llama_shapes import SHAPES
from nvfp4_kernels import (
    add_rms_norm,
    decode_attention,
    gemm,
    rotary_embedding,
    silu_mul_gemm,
)
from nvfp4_kernels.formats.fragments import Fragments, fragment_shapes
from nvfp4_kernels.gemm.sm90 import choose
from nvfp4_kernels.gemm.sm90 import launch as product
from nvfp4_kernels.gemm.sm90.choose import Problem, choose_config, fits, with_store
from nvfp4_kernels.gemm.sm90.tile import MAX_STAGES, EpilogueConfig, Tile
from nvfp4_kernels.runtime.compile import ARCH_VARIABLE, arch, build, object_path
from nvfp4_kernels.sm90.limits import SMS
from nvfp4_kernels.tool.timed_graphs import captured, timed

MODELS = ("llama-8b", "llama-70b-tp4")
PRODUCTS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
PAGE_SIZE, EPS = 16, 1e-5
LAYERS = 8  # some 120 MB of weights each

Choice = tuple[Tile, EpilogueConfig]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's layers."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    def product(self, name: str) -> tuple[int, int, int]:
        """Rows and K of a weight of the product ``name``; number of weights, 2 for gate and up."""
        return {
            "qkv_proj": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden, 1),
            "o_proj": (self.hidden, self.heads * self.head_dim, 1),
            "gate_up_proj": (self.intermediate, self.hidden, 2),
            "down_proj": (self.hidden, self.intermediate, 1),
        }[name]


@dataclass(frozen=True)
class Layer:
    """Operands of a layer; every forward pass allocates new tensors for results.

    Attributes:
        shape: sizes of the layer.
        weights: weights by product.
        alpha: factors of the products, float32 ``(2,)``.
        norm: weight of both norms.
        cache: KV cache, bfloat16 ``(pages, kv_heads, PAGE_SIZE, 2 · head_dim)``.
    """

    shape: Shape
    weights: dict[str, list[Fragments]]
    alpha: Tensor
    norm: Tensor
    cache: Tensor


@dataclass(frozen=True)
class Step:
    """Tensors of a decode step that all layers share; ``x`` is the input of every layer."""

    positions: Tensor
    cos_sin: Tensor
    table: Tensor
    seq_lens: Tensor
    slots: Tensor
    x: Tensor


def shape_of(model: str) -> Shape:
    """Sizes of a model's layers, from its published config."""
    config = SHAPES[model]
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    return Shape(*(config[name] for name in names))


def layer_of(shape: Shape, pages: int) -> Layer:
    """Random operands of one layer, with a cache of ``pages`` pages."""
    weights = {}
    for name in PRODUCTS:
        n, k, count = shape.product(name)
        data, scales = fragment_shapes(n, k)
        weights[name] = [
            Fragments(
                torch.randint(256, data, dtype=torch.uint8, device="cuda"),
                torch.randint(32, 56, scales, dtype=torch.uint8, device="cuda"),
            )
            for _ in range(count)
        ]
    pages_of_keys = pages, shape.kv_heads, PAGE_SIZE, 2 * shape.head_dim
    cache = torch.randn(pages_of_keys, device="cuda", dtype=torch.bfloat16)
    ones = torch.ones(shape.hidden, device="cuda", dtype=torch.bfloat16)
    return Layer(shape, weights, torch.full((2,), 1e-3, device="cuda"), ones, cache)


def step_of(shape: Shape, tokens: int, keys: int) -> Step:
    """Random inputs of one decoding step of ``tokens`` sequences with ``keys`` keys each."""
    each = -(-keys // PAGE_SIZE)
    table = torch.randperm(tokens * each, device="cuda").view(tokens, each).int()
    slots = table[:, (keys - 1) // PAGE_SIZE].long() * PAGE_SIZE + (keys - 1) % PAGE_SIZE
    lengths = torch.full((tokens,), keys, dtype=torch.int32, device="cuda")
    cos_sin = torch.rand(keys, shape.head_dim, device="cuda").bfloat16()
    x = torch.randn(tokens, shape.hidden, device="cuda").bfloat16()
    return Step(lengths.long() - 1, cos_sin, table, lengths, slots, x)


def forward(layer: Layer, step: Step) -> None:
    """Launch a layer's kernels in vLLM's order; ``step.x`` is both input and residual."""
    shape, alpha, tokens = layer.shape, layer.alpha[:1], len(step.x)

    def times(name: str, x: Tensor) -> Tensor:
        [weight] = layer.weights[name]
        return gemm(x, None, *weight, alpha, [shape.product(name)[0]], out_dtype=x.dtype)

    normed, residual = add_rms_norm(step.x, step.x, layer.norm, EPS)
    qkv = times("qkv_proj", normed).view(tokens, -1, shape.head_dim)
    q, key, value = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    q, key = rotary_embedding(step.positions, q, key, step.cos_sin)
    attended = decode_attention(q, key, value, layer.cache, step.table, step.seq_lens, step.slots)
    normed, _ = add_rms_norm(times("o_proj", attended.view(tokens, -1)), residual, layer.norm, EPS)
    gate, up = layer.weights["gate_up_proj"]
    inner = silu_mul_gemm(
        normed, None, *gate, *up, layer.alpha, out_dtype=normed.dtype, n=shape.intermediate
    )
    times("down_proj", inner)


# --- tiles ------------------------------------------------------------------------------------


def problem_of(shape: Shape, name: str, tokens: int) -> Problem:
    """GEMM problem of the product ``name``."""
    n, k, weights = shape.product(name)
    return Problem(tokens, n, k, weights)


def tiles_of(problem: Problem) -> Iterator[Choice]:
    """Candidate tiles for a product, each with its epilogue.

    Candidates are variants of the tile that is usually chosen; they serve the problem with at least
    ``SMS // 3`` CTAs.
    """
    usual, _ = choose_config(problem, EpilogueConfig())
    usual = replace(usual, max_stages=MAX_STAGES)
    teams = ((1, 1), (2, 1), (2, 2), (4, 4)) if usual.uses_mma_sync else ((1, 1), (2, 1))
    for (warpgroups, slices), k_tiles, split in itertools.product(
        teams, (1, 2, 4, 8), (1, 2, 4, 8)
    ):
        tile = replace(
            usual,
            warpgroups=warpgroups,
            slices=slices,
            k_tiles=k_tiles,
            split_k=split,
            ctas_per_sm=1,
        )
        together = min(4, -(-choose.ctas(problem, tile) // SMS))
        for each in range(1, together + 1):
            one = replace(tile, ctas_per_sm=each)
            output = with_store(EpilogueConfig(), one, problem.n)
            if choose.ctas(problem, one) >= SMS // 3 and fits(problem, one, output):
                yield one, output


def compile_tile(choice: Choice) -> None:
    """Compile one candidate, in a worker process, unless the object file exists."""
    from nvfp4_kernels.gemm.sm90.kernel import WeightOnlyGemm

    kernel = WeightOnlyGemm(*choice)
    place = object_path(kernel)
    if place is not None and not place.exists():
        build(kernel, place)


@contextmanager
def chosen(tiles: dict[Problem, Choice]) -> Iterator[None]:
    """Context in which GEMMs of the problems in ``tiles`` use the tiles given there."""

    def choose_tile(problem: Problem, output: EpilogueConfig, sms: int) -> Choice:
        return tiles.get(problem) or choose_config(problem, output, sms)

    names: dict[str, Any] = vars(product)
    before = names["choose_config"]
    names["choose_config"] = choose_tile
    try:
        yield
    finally:
        names["choose_config"] = before


def said(choice: Choice) -> str:
    """Description of a tile, for the output."""
    tile, _ = choice
    return (
        f"{tile.warpgroups} warpgroups, {tile.k_tiles} K tiles, {tile.split_k} parts of K, "
        f"{tile.slices} slices, {tile.ctas_per_sm} CTAs of an SM"
    )


def main() -> None:
    """Time layers, or sweep tiles, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--keys", type=int, default=192)
    parser.add_argument("--sweep", nargs="*", choices=PRODUCTS, default=[])
    parser.add_argument("--best", type=int, default=8, help="tiles to list of each product")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    cuda_device()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    os.environ[ARCH_VARIABLE] = arch()  # processes that compile need no GPU
    shape = shape_of(given.model)
    for tokens in given.tokens:
        step = step_of(shape, tokens, given.keys)
        layers = [layer_of(shape, int(step.table.max()) + 1) for _ in range(LAYERS)]
        steps = [partial(forward, layer, step) for layer in layers]
        for name in given.sweep or [""]:
            tiles = list(tiles_of(problem_of(shape, name, tokens))) if name else []
            with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
                list(pool.map(compile_tile, tiles))
            graphs = {"as chosen": captured(steps, LAYERS)}
            for tile in tiles:
                with chosen({problem_of(shape, name, tokens): tile}):
                    graphs[said(tile)] = captured(steps, LAYERS)
            times = {n: statistics.median(t) for n, t in timed(graphs, given.rounds).items()}
            print(f"{tokens} tokens, {given.keys} keys: {times.pop('as chosen'):.2f} us a layer")
            for tile_name in sorted(times, key=times.__getitem__)[: given.best]:
                print(f"    {name} {times[tile_name]:.2f}: {tile_name}", flush=True)


if __name__ == "__main__":
    with refusals():
        main()
