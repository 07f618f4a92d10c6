"""Modelled time of a decode layer's launches in a chain, each overlapping its predecessor.

    python -m tests.modelled.layer                      products in a chain, on a B200
    python -m tests.modelled.layer --model llama-70b-tp4 --tokens 1 64
    python -m tests.modelled.layer --arch sm_90         GEMMs and whole layers, against an H200

One cluster of each launch runs in the emulator; from these clusters the time model
(``tests/emulator/timing``) builds the grids and their chain. Consecutive layers have separate
weights; the time of a layer, or of a product, is from its predecessor's end to its own end. On
sm_90, where times were measured, each modelled time is followed by its error. ``decoder_layer`` has
whole layers on a B200.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nvfp4_kernels.devices import UnknownArchitecture, parse_arch, spellings
from tests.emulator.timing import (
    B200_TIMING,
    H200_TIMING,
    Link,
    OpaqueLink,
    Parameters,
    chain,
    model,
)
from tests.modelled.layer_sm90 import LayerSm90
from tests.modelled.layer_sm100 import ProductsSm100
from tests.modelled.measured import LAYERS_US, PRODUCTS_US
from tests.modelled.traces import Traced, Tracer

if TYPE_CHECKING:
    from examples.kernel_bench.layer import Shape

MODELS = ("llama-8b", "llama-70b-tp4")
PRODUCTS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
TOKENS = {"sm_90": (1, 8, 16, 32, 64, 128), "sm_100": (1, 8, 16, 32, 64, 128, 256)}
LAUNCHES = 3  # at least, in a chain of one product: the first has no predecessor to overlap
# Settings of the measured runs: read bandwidth, and the cycles of a µs that the chooser of sm_90
# was fitted with.
MEASURED_H200 = replace(H200_TIMING, hbm_bandwidth=4.4, clock=1.7)


def layers(launches: Sequence[Traced | OpaqueLink], count: int) -> list[Link | OpaqueLink]:
    """Launches of ``count`` layers; each layer has its own operands that no launch writes."""
    handed_on = {name for each in launches for name in each.writes}
    return [_link(each, number, handed_on) for number in range(count) for each in launches]


def _link(each: Traced | OpaqueLink, number: int, handed_on: set[str]) -> Link | OpaqueLink:
    if isinstance(each, OpaqueLink):
        return each
    operands = tuple(
        operand
        if operand.name in handed_on
        else replace(operand, name=f"{operand.name} of layer {number}")
        for operand in each.operands
    )
    return Link(
        each.launch,
        each.clusters,
        operands,
        each.writes,
        each.registers,
        each.repeats,
        each.label,
    )


def layer_time(launches: Sequence[Traced], parameters: Parameters) -> float:
    """Microseconds of a layer that follows another layer."""
    count = max(2, LAUNCHES // len(launches))
    return chain(layers(launches, count), parameters).period(len(launches))


def compared(name: str, modelled: float, measured: float | None) -> str:
    """Modelled time in µs, with its error if there is a measured time."""
    if measured is None:
        return f"{name} {modelled:.1f}"
    return f"{name} {modelled:.1f} of {measured:g} ({modelled / measured - 1:+.0%})"


def hopper(tracer: Tracer, model_name: str, shape: "Shape", tokens: int, keys: int) -> str:
    """Lines of modelled times, with measured times, of each GEMM and the layer on an H200."""
    p = MEASURED_H200
    layer = LayerSm90(tracer, shape, tokens, keys)
    read = {"qkv_proj": "normed", "o_proj": "attended", "gate_up_proj": "normed", "down_proj": "y"}
    written = {"qkv_proj": "qkv", "o_proj": "x", "gate_up_proj": "y", "down_proj": "x"}
    products = {name: layer.product(name, read[name], written[name]) for name in PRODUCTS}
    measured = PRODUCTS_US[model_name].get(tokens, (None,) * len(PRODUCTS))
    said = [
        compared(name, layer_time([each], p), us)
        for (name, each), us in zip(products.items(), measured, strict=True)
    ]
    qkv, o, gate_up, down = products.values()
    norm = layer.norm("x", "normed")
    launches = [norm, qkv, layer.rotation(), layer.attention(), o, norm, gate_up, down]
    whole = layer_time(launches, p)
    return ", ".join([*said, compared("layer", whole, LAYERS_US[model_name].get(tokens))])


def blackwell(
    tracer: Tracer, shape: "Shape", tokens: int, terms: int, only_chain: bool = False
) -> str:
    """Products of a layer on a B200: one by one unless ``only_chain``, and in a chain."""
    p = B200_TIMING
    layer = ProductsSm100(tracer, shape, tokens, terms)
    names = ("x", "qkv", "y", "z", "x")
    products = [
        layer.product(name, read, written)
        for name, read, written in zip(PRODUCTS, names, names[1:], strict=False)
    ]
    together = f"in a chain {layer_time(products, p):.1f}"
    if only_chain:
        return together
    alone = [
        model(
            each.launch,
            p,
            clusters=each.clusters,
            footprint=sum(operand.total for operand in each.operands),
            registers=each.registers,
        ).microseconds
        for each in products
    ]
    weights = sum(n * k * count for n, k, count in map(shape.product, PRODUCTS))
    flops = 2.0 * tokens * terms * weights
    least = max(weights * 0.5625 / (p.hbm_bandwidth * 1e6), flops / 9.0e9)
    return (
        ", ".join(f"{name} {us:.2f}" for name, us in zip(PRODUCTS, alone, strict=True))
        + f"; one by one {sum(alone):.1f}, {together}, least {least:.1f}"
    )


def main() -> None:
    """Print a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", default="sm_100", help=spellings(TOKENS))
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--keys", type=int, default=192, help="of each sequence, on sm_90")
    parser.add_argument("--terms", type=int, default=1, help="of the activations, on sm_100")
    parser.add_argument("--only-chain", action="store_true", help="no product alone, on sm_100")
    given = parser.parse_args()
    try:
        given.arch = parse_arch("--arch", given.arch, TOKENS)
    except UnknownArchitecture as error:
        parser.error(str(error))
    tracer = Tracer(given.arch)
    from examples.kernel_bench.layer import shape_of

    shape = shape_of(given.model)
    for tokens in given.tokens or TOKENS[given.arch]:
        start = time.monotonic()
        if given.arch == "sm_90":
            said = hopper(tracer, given.model, shape, tokens, given.keys)
        else:
            said = blackwell(tracer, shape, tokens, given.terms, given.only_chain)
        print(f"{tokens} tokens, µs: {said} [{time.monotonic() - start:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
