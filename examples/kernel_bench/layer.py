"""Benchmark of a decoder layer's kernels in sequence on a Hopper GPU, also with other tiles.

    python -m examples.kernel_bench.layer
    python -m examples.kernel_bench.layer --tokens 1 --sweep o_proj down_proj
    python -m examples.kernel_bench.layer --model llama-70b-tp4 --activation fp8

Benchmarked alone, a GEMM cannot prefetch weights while its predecessor ends: the fastest tile of
such a benchmark need not be the fastest in a layer. Here the layers of a Llama, each with its own
weights and caches, are captured as one CUDA graph per tile; graphs replay in turn, and medians are
printed. A layer of llama-70b-tp4 is the work of one of four GPUs, without communication.

Activations of products are in 16 bits, or in FP8 (E4M3, a static scale): then both norms and
SiLU-mul write E4M3, and attention's result is quantised by a launch of its own.
"""

import argparse
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from examples.command_line import refusals
from examples.kernel_bench.layer_tiles import chosen, compile_tile, said, tiles_of
from examples.kernel_bench.machine import cuda_device
from examples.llama_shapes import SHAPES
from nvfp4_kernels import (
    StaticFp8,
    add_rms_norm,
    add_rms_norm_quantize,
    decode_attention,
    gemm,
    quantize,
    rotary_embedding,
    silu_mul_gemm,
)
from nvfp4_kernels.formats.folded import to_folded
from nvfp4_kernels.formats.fp8_rows import FP8_MAX, padded
from nvfp4_kernels.formats.fragments import to_fragments
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from nvfp4_kernels.gemm.sm90.choose import Problem
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig
from nvfp4_kernels.runtime.compile import ARCH_VARIABLE, arch
from nvfp4_kernels.tool.timed_graphs import captured, timed

Activation = Literal["16-bit", "fp8"]
MODELS = ("llama-8b", "llama-70b-tp4")
PRODUCTS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
PAGE_SIZE, EPS = 16, 1e-5
LAYERS = 8  # some 120 MB of weights each
LARGEST = 6.0  # magnitude of activations that E4M3's maximum stands for
_WEIGHT_RMS = 1.42  # of the random weights below, without alpha


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


class Weights(NamedTuple):
    """Weights of a product: fragments or, for FP8 activations, folded.

    Attributes:
        data: uint8 ``(weights, …)``.
        scales: block scales ``(weights, …)``.
        alpha: float32 ``(weights,)``; folded, ``(weights, N)``.
    """

    data: Tensor
    scales: Tensor
    alpha: Tensor


@dataclass(frozen=True)
class Layer:
    """Operands of a layer; every forward pass allocates new tensors for results.

    Attributes:
        shape: sizes of the layer.
        weights: weights by product.
        output: format of the products' inputs; None: bfloat16.
        norm: weight of both norms.
        cache: KV cache, bfloat16 ``(pages, kv_heads, PAGE_SIZE, 2 · head_dim)``.
    """

    shape: Shape
    weights: dict[str, Weights]
    output: StaticFp8 | None
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


def layer_of(shape: Shape, pages: int, activation: Activation, device: torch.device) -> Layer:
    """Random operands of one layer, with a cache of ``pages`` pages.

    The same random state gives the same NVFP4 weights for either ``activation``.
    """
    is_fp8 = activation == "fp8"
    scale = torch.tensor(LARGEST / FP8_MAX, device=device)
    weights = {}
    for name in PRODUCTS:
        n, k, count = shape.product(name)
        data = torch.randint(256, (count, n, k // 2), dtype=torch.uint8, device=device)
        bits = torch.randint(32, 56, (count, n, k // BLOCK_SIZE), dtype=torch.uint8, device=device)
        scales = bits.view(torch.float8_e4m3fn)
        alpha = 1 / (_WEIGHT_RMS * k**0.5)  # results have the variance of activations
        if is_fp8:
            folded = to_folded(data, scales)
            factors = folded.row_scale * (alpha * scale)
            weights[name] = Weights(folded.data, folded.scales, factors)
        else:
            weights[name] = Weights(
                *to_fragments(data, scales), torch.full((count,), alpha, device=device)
            )
    pages_of_keys = pages, shape.kv_heads, PAGE_SIZE, 2 * shape.head_dim
    cache = torch.randn(pages_of_keys, device=device, dtype=torch.bfloat16)
    ones = torch.ones(shape.hidden, device=device, dtype=torch.bfloat16)
    return Layer(shape, weights, StaticFp8(scale) if is_fp8 else None, ones, cache)


def step_of(shape: Shape, tokens: int, keys: int, device: torch.device) -> Step:
    """Random inputs of one decoding step of ``tokens`` sequences with ``keys`` keys each."""
    each = -(-keys // PAGE_SIZE)
    table = torch.randperm(tokens * each, device=device).view(tokens, each).int()
    slots = table[:, (keys - 1) // PAGE_SIZE].long() * PAGE_SIZE + (keys - 1) % PAGE_SIZE
    lengths = torch.full((tokens,), keys, dtype=torch.int32, device=device)
    cos_sin = torch.rand(keys, shape.head_dim, device=device).bfloat16()
    x = torch.randn(tokens, shape.hidden, device=device).bfloat16()
    return Step(lengths.long() - 1, cos_sin, table, lengths, slots, x)


def forward(layer: Layer, step: Step) -> Tensor:
    """Launch a layer's kernels in vLLM's order; ``step.x`` is both input and residual.

    Returns the result of the last product, bfloat16 ``(tokens, hidden)``.
    """
    shape, tokens = layer.shape, len(step.x)

    def times(name: str, x: Tensor) -> Tensor:
        data, scales, alpha = layer.weights[name]
        return gemm(x, None, data[0], scales[0], alpha.view(-1), [shape.product(name)[0]])

    def normed(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if layer.output is None:
            return add_rms_norm(x, residual, layer.norm, EPS)
        return add_rms_norm_quantize(x, residual, layer.norm, EPS, layer.output)

    rows, residual = normed(step.x, step.x)
    qkv = times("qkv_proj", rows).view(tokens, -1, shape.head_dim)
    q, key, value = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    q, key = rotary_embedding(step.positions, q, key, step.cos_sin)
    attended = decode_attention(
        q, key, value, layer.cache, step.table, step.seq_lens, step.slots
    ).view(tokens, -1)
    rows = attended if layer.output is None else quantize(attended, layer.output)
    rows, _ = normed(times("o_proj", rows), residual)
    (gate, up), (gate_scales, up_scales), alpha = layer.weights["gate_up_proj"]
    pair = gate, gate_scales, up, up_scales, alpha
    if layer.output is None:
        inner = silu_mul_gemm(rows, None, *pair, n=shape.intermediate)
    else:
        inner = silu_mul_gemm(rows, None, *pair, n=shape.intermediate, output=layer.output)
    return times("down_proj", inner)


def product_of(
    shape: Shape, name: str, tokens: int, activation: Activation
) -> tuple[Problem, EpilogueConfig]:
    """GEMM problem of the product ``name``, and its epilogue."""
    n, k, weights = shape.product(name)
    if activation == "16-bit":
        return Problem(tokens, n, k, weights), EpilogueConfig()
    writes_fp8 = name == "gate_up_proj"
    output = EpilogueConfig(
        act="float8_e4m3fn", dtype="float8_e4m3fn" if writes_fp8 else "bfloat16"
    )
    return Problem(tokens, n, padded(k), weights), output


def main() -> None:
    """Time layers, or sweep tiles, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--activation", choices=get_args(Activation), default="16-bit")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--keys", type=int, default=192)
    parser.add_argument("--sweep", nargs="*", choices=PRODUCTS, default=[])
    parser.add_argument("--best", type=int, default=8, help="tiles to list of each product")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    device = cuda_device()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    os.environ[ARCH_VARIABLE] = arch()  # processes that compile need no GPU
    shape, activation = shape_of(given.model), given.activation
    for tokens in given.tokens:
        step = step_of(shape, tokens, given.keys, device)
        pages = int(step.table.max()) + 1
        layers = [layer_of(shape, pages, activation, device) for _ in range(LAYERS)]
        steps = [partial(forward, layer, step) for layer in layers]
        for name in given.sweep or [""]:
            graphs = {"as chosen": captured(steps, LAYERS)}
            if name:
                problem, output = product_of(shape, name, tokens, activation)
                tiles = tiles_of(problem, output)
                with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
                    list(pool.map(compile_tile, tiles))
                for tile in tiles:
                    with chosen(problem, tile):
                        graphs[said(tile)] = captured(steps, LAYERS)
            times = {n: statistics.median(t) for n, t in timed(graphs, given.rounds).items()}
            layer_time = times.pop("as chosen")
            print(f"{tokens} tokens, {given.keys} keys, {activation}: {layer_time:.2f} us a layer")
            for tile_name in sorted(times, key=times.__getitem__)[: given.best]:
                print(f"    {name} {times[tile_name]:.2f}: {tile_name}", flush=True)


if __name__ == "__main__":
    with refusals():
        main()
