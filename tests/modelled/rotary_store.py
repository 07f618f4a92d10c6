"""Modelled time of ``rotary_store`` on a B200, against the time that its bytes alone take.

    python -m tests.modelled.rotary_store                     Llama 8B's heads, 1 to 8192 tokens
    python -m tests.modelled.rotary_store --norms --fp8       Qwen3's norms, an E4M3 cache

Some of each grid's CTAs run in the emulator, with their work in the whole grid; the time model
(``tests/emulator/timing``) builds the grid from them. L2 is empty. Nothing was measured on a B200.
"""

import argparse
from functools import partial

from tests.emulator.timing import B200_TIMING, chain
from tests.modelled.layer import layers
from tests.modelled.traces import Traced, Tracer, aligned, operand

TOKENS = (1, 64, 8192)
HEADS = 32, 8, 128  # query heads, KV heads and D
PAGE_SIZE = 16
TRACED_CTAS = 160  # per grid, at most


def traced(
    tracer: Tracer, tokens: int, norms: bool, fp8: bool, sizes: tuple[int, int, int] = HEADS
) -> tuple[Traced, float]:
    """Traced launch for tokens at the ends of different pages, and the bytes that it moves."""
    import torch

    from nvfp4_kernels.rotary.store.call import RotaryStoreCall
    from nvfp4_kernels.rotary.store.launch import rotary_store

    query_heads, kv_heads, head_dim = sizes
    heads = query_heads, kv_heads, kv_heads
    qkv = aligned(torch.zeros(tokens, sum(heads), head_dim, dtype=torch.bfloat16))
    q, k, v = qkv.split(heads, 1)
    positions = aligned(torch.randperm(max(tokens, 1024))[:tokens])
    table = aligned(torch.zeros(max(tokens, 1024), head_dim, dtype=torch.bfloat16))
    pages = -(-tokens // PAGE_SIZE) + 1
    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    cache = aligned(torch.zeros(pages, kv_heads, PAGE_SIZE, 2 * head_dim).to(kind))
    slots = aligned(torch.randperm(pages * PAGE_SIZE)[:tokens])
    weight = aligned(torch.ones(head_dim, dtype=torch.bfloat16)) if norms else None
    scale = aligned(torch.ones(1)).reshape(()) if fp8 else None
    out = aligned(torch.zeros(tokens, query_heads, head_dim, dtype=torch.bfloat16))
    call = RotaryStoreCall(
        out, q, k, v, positions, table, cache, slots, weight, weight, scale, scale, True,
        1e-6 if norms else None,
    )  # fmt: skip
    launched, registers = tracer.run(partial(rotary_store, call), TRACED_CTAS)
    stored = 2 * tokens * kv_heads * head_dim * cache.element_size()
    operands = [
        operand("qkv", qkv, qkv.nbytes),
        operand("positions", positions, positions.nbytes),
        operand("table", table, tokens * table[0].nbytes),
        operand("slots", slots, slots.nbytes),
    ]
    writes = {"q": float(out.nbytes), "cache": float(stored)}
    nbytes = sum(each.total for each in operands) + sum(writes.values())
    clusters = launched.grid[0]
    return Traced(launched, clusters, tuple(operands), writes, registers), nbytes


def main() -> None:
    """Print a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--norms", action="store_true", help="of queries and keys")
    parser.add_argument("--fp8", action="store_true", help="an E4M3 cache")
    given = parser.parse_args()
    tracer, p = Tracer("sm_100"), B200_TIMING
    for tokens in given.tokens:
        each, nbytes = traced(tracer, tokens, given.norms, given.fp8)
        us = chain(layers([each], 1), p).microseconds
        rate = nbytes / us / 1e6
        print(
            f"{tokens} tokens: {us:.2f} µs, {nbytes / 1e6:.3f} MB, {rate:.2f} TB/s, "
            f"{rate / p.hbm_bandwidth:.0%} of HBM; {each.clusters} CTAs of "
            f"{each.launch.block[0]} threads, {each.registers} registers",
            flush=True,
        )


if __name__ == "__main__":
    main()
