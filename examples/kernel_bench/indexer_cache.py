"""Benchmark of the indexer's cache on this machine's GPU: store, gather, quantise queries.

    python -m examples.kernel_bench.indexer_cache
    python -m examples.kernel_bench.indexer_cache --tokens 1 64 8192 --keys 131072

vLLM's kernels that store and gather FP8 are timed too where installed, after a comparison of the
results. Launches are captured in CUDA graphs, which replay in turn; medians are printed.
Inputs rotate, so that L2 is always cold.
"""

import argparse
import statistics
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from examples.command_line import refusals
from examples.kernel_bench.machine import cuda_device
from nvfp4_kernels import indexer_gather_k, indexer_quantize_q, indexer_store_k
from nvfp4_kernels.indexer.formats import Format, format_of
from nvfp4_kernels.tool.timed_graphs import Step, captured, timed

HEADS, HEAD_DIM, BLOCK_SIZE = 64, 128, 64
FORMATS = ("nvfp4", "mxfp4", "fp8", "bf16")
COLD_BYTES = 256 << 20  # rotating inputs: several times L2
KEY_BYTES = 2 * HEAD_DIM  # bfloat16
SLOT_BYTES = 8


def global_scale(fmt: str) -> Tensor | None:
    """Global scale of a format, or None if the format has no global scale."""
    return torch.tensor(0.001, device="cuda") if fmt == "nvfp4" else None


def new_cache(fmt: Format, keys: int) -> Tensor:
    """Empty cache for ``keys`` keys."""
    pages = -(-keys // BLOCK_SIZE)
    size = fmt.page_bytes(HEAD_DIM, BLOCK_SIZE)
    return torch.zeros(pages, size, dtype=torch.uint8, device="cuda")


def stored_bytes(fmt: Format) -> int:
    """Bytes of one key in the cache, scales included."""
    return fmt.page_bytes(HEAD_DIM, BLOCK_SIZE) // BLOCK_SIZE


def vllm_view(cache: Tensor) -> Tensor:
    """Cache viewed in the shape that vLLM's kernels take."""
    return cache.view(len(cache), BLOCK_SIZE, -1)


def store(tokens: int) -> dict[str, tuple[list[Step], int]]:
    """Steps that store ``tokens`` keys, by contender, and the bytes that a step moves."""
    slots = torch.randperm(max(tokens, 1 << 17), device="cuda")[:tokens]
    copies = max(2, -(-COLD_BYTES // (tokens * KEY_BYTES * 2)))
    inputs = [
        torch.randn(tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(min(copies, 64))
    ]
    found: dict[str, tuple[list[Step], int]] = {}
    for name in FORMATS:
        fmt, scale = format_of(name), global_scale(name)
        cache = new_cache(fmt, 1 << 17)
        steps: list[Step] = [
            partial(indexer_store_k, k, cache, slots, name, BLOCK_SIZE, scale) for k in inputs
        ]
        found[f"ours, {name}"] = steps, tokens * (KEY_BYTES + SLOT_BYTES + stored_bytes(fmt))
        if name == "fp8" and vllm_ops() is not None:
            theirs = new_cache(fmt, 1 << 17)
            op = vllm_ops().indexer_k_quant_and_cache
            steps[0]()
            op(inputs[0], vllm_view(theirs), slots, HEAD_DIM, "ue8m0")
            print(f"  fp8 stored as by vLLM: {torch.equal(cache, theirs)}")
            rival: list[Step] = [
                partial(op, k, vllm_view(theirs), slots, HEAD_DIM, "ue8m0") for k in inputs
            ]
            found["vLLM, fp8"] = rival, found["ours, fp8"][1]
    return found


def gather(keys: int) -> dict[str, tuple[list[Step], int]]:
    """Steps that gather four sequences, ``keys`` keys in all, by contender, and a step's bytes."""
    starts = torch.arange(0, keys + 1, keys // 4, dtype=torch.int32, device="cuda")
    pages = keys // BLOCK_SIZE
    found: dict[str, tuple[list[Step], int]] = {}
    for name in FORMATS:
        fmt = format_of(name)
        copies = max(2, COLD_BYTES // (keys * stored_bytes(fmt)))
        caches = [new_cache(fmt, keys).random_() for _ in range(copies)]
        table = torch.randperm(pages, device="cuda").view(4, -1).to(torch.int32)
        steps: list[Step] = [
            partial(indexer_gather_k, cache, table, starts, keys, HEAD_DIM, name, BLOCK_SIZE)
            for cache in caches
        ]
        found[f"ours, {name}"] = steps, 2 * keys * stored_bytes(fmt)
        if name == "fp8" and vllm_ops() is not None:
            op = vllm_ops().cp_gather_indexer_k_quant_cache
            data = torch.empty(keys, HEAD_DIM, dtype=torch.uint8, device="cuda")
            scales = torch.empty(keys, 4, dtype=torch.uint8, device="cuda")
            op(vllm_view(caches[0]), data, scales, table, starts)
            ours, our_scales = indexer_gather_k(
                caches[0], table, starts, keys, HEAD_DIM, name, BLOCK_SIZE
            )
            assert our_scales is not None
            same = torch.equal(ours.view(torch.uint8), data)
            same &= torch.equal(our_scales.view(torch.uint8).view(keys, 4), scales)
            print(f"  fp8 gathered as by vLLM: {same}")
            rival: list[Step] = [
                partial(op, vllm_view(cache), data, scales, table, starts) for cache in caches
            ]
            found["vLLM, fp8"] = rival, found["ours, fp8"][1]
    return found


def quantize(tokens: int) -> dict[str, tuple[list[Step], int]]:
    """Steps that quantise ``tokens`` · ``HEADS`` queries, by contender, and a step's bytes."""
    vectors = tokens * HEADS
    copies = min(64, max(2, COLD_BYTES // (vectors * KEY_BYTES)))
    inputs = [
        torch.randn(tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(copies)
    ]
    found: dict[str, tuple[list[Step], int]] = {}
    for name in FORMATS:
        steps: list[Step] = [
            partial(indexer_quantize_q, q, name, global_scale(name)) for q in inputs
        ]
        found[f"ours, {name}"] = steps, vectors * (KEY_BYTES + stored_bytes(format_of(name)))
    return found


def vllm_ops():  # type: ignore[no-untyped-def]
    """Cache ops of vLLM, or None if vLLM is not installed."""
    if find_spec("vllm") is None:
        return None
    import_module("vllm._custom_ops")  # registers the ops
    return torch.ops._C_cache_ops


def show(title: str, contenders: dict[str, tuple[list[Step], int]], rounds: int) -> None:
    """Time contenders in turn; print the median time and the rate of each."""
    launches = 32
    graphs = {name: captured(steps, launches) for name, (steps, _) in contenders.items()}
    times = timed(graphs, rounds)
    print(title)
    for name, taken in times.items():
        median, moved = statistics.median(taken), contenders[name][1]
        print(f"  {name:14} {median:8.2f} us  {moved / median / 1e6:6.2f} TB/s")


def main() -> None:
    """Check, time and print storing, gathering and quantising."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 8192])
    parser.add_argument("--keys", type=int, nargs="+", default=[131_072])
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    cuda_device()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for tokens in given.tokens:
        show(f"store {tokens} keys", store(tokens), given.rounds)
        show(f"quantise {tokens} x {HEADS} queries", quantize(tokens), given.rounds)
    for keys in given.keys:
        show(f"gather {keys} keys of 4 sequences", gather(keys), given.rounds)


if __name__ == "__main__":
    with refusals():
        main()
