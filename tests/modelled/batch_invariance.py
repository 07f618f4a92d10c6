"""The modelled cost on a B200 of one tile for all batch sizes, against the chosen tile.

    python -m tests.modelled.batch_invariance products     a Llama 8B's, of 1 to 8192 tokens
    python -m tests.modelled.batch_invariance attention    its decodes and a prefill

Times are those of ``tests.modelled.gemm`` and ``tests.modelled.attention``: without launches, and
for attention without the merge of split keys. Nothing here was measured on a B200.
"""

import argparse
from dataclasses import replace

from tests.modelled import attention, gemm

TOKENS = (1, 16, 64, 256, 8192)
# N, K, weights.
PRODUCTS = {
    "qkv": (6144, 4096, 1),
    "o": (4096, 4096, 1),
    "gate and up": (14336, 4096, 2),
    "down": (4096, 14336, 1),
}
SHAPES = {
    "decode 1 × 1024": attention.Shape(1, 1, 1024, 128),
    "decode 1 × 16384": attention.Shape(1, 1, 16384, 128),
    "decode 16 × 1024": attention.Shape(16, 1, 1024, 128),
    "decode 64 × 4096": attention.Shape(64, 1, 4096, 128),
    "prefill 4096": attention.Shape(1, 4096, 4096, 128),
    "prefill 4096, fp8": attention.Shape(1, 4096, 4096, 128, fp8=True),
}
LINE = "{name:24} {chosen:8.1f} us chosen, {fixed:8.1f} us fixed: {ratio:.2f}"


def products() -> None:
    """Print a line for each product and number of tokens, and a line for a whole layer."""
    modeller = gemm.Modeller()
    from nvfp4_kernels.gemm.sm100.choose import Problem, choose_batch_invariant, choose_config
    from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig

    for m in TOKENS:
        total = [0.0, 0.0]
        for name, (n, k, weights) in PRODUCTS.items():
            problem, output = Problem(m, n, k, 1, weights), EpilogueConfig("bfloat16")
            configs = choose_config(problem, output), choose_batch_invariant(problem, output)
            times = [modeller.time(problem, *config).microseconds for config in configs]
            total = [before + each for before, each in zip(total, times, strict=True)]
            _print(f"{name}, {m}", *times)
        _print(f"layer, {m}", *total)


def attentions() -> None:
    """Print a line for each shape."""
    modeller = attention.Modeller()
    from nvfp4_kernels.attention.sm100.choose import choose_config

    for name, shape in SHAPES.items():
        times = []
        for batch_invariant in (False, True):
            problem = replace(shape.problem(), batch_invariant=batch_invariant)
            tile, splits = choose_config(problem)
            if shape.queries > 1:
                times.append(attention.prefill(modeller, tile, shape) * 1e6)
            else:
                times.append(attention.decode(modeller, tile, shape, splits) * 1e6)
        _print(name, *times)


def _print(name: str, chosen: float, fixed: float) -> None:
    print(LINE.format(name=name, chosen=chosen, fixed=fixed, ratio=fixed / chosen), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["products", "attention"])
    {"products": products, "attention": attentions}[parser.parse_args().what]()


if __name__ == "__main__":
    main()
