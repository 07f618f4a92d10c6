"""Benchmark of a layer of NVFP4 experts against vLLM's Marlin kernels on this machine's GPU.

    python -m examples.kernel_bench.experts                          Qwen3-30B, 1 to 8192 tokens
    python -m examples.kernel_bench.experts --model deepseek-ep8 --tokens 1 64
    python -m examples.kernel_bench.experts --choice same            all tokens choose the same ones

Weights in 4 bits, activations in 16: from the router's choice to each token's sum. Tokens choose
their experts at random, all alike, or as ``--choice`` says. Each contender's launches are captured
in a CUDA graph, weights and choices of several layers in turn, so that L2 holds none of the next;
graphs replay in turn, and medians are printed. Before that, our result is compared with a float32
product of decoded weights.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from examples.command_line import refusals
from examples.kernel_bench.machine import cuda_device
from nvfp4_kernels.activation import SILU
from nvfp4_kernels.fragments import Fragments, decode_fragments, to_fragments
from nvfp4_kernels.gemm.sm90.launch_grouped import grouped_gemm, grouped_silu_mul_gemm
from nvfp4_kernels.grouped_gemm.tile_tokens import ExpertSizes, choose_tile_tokens
from nvfp4_kernels.moe_combine import moe_combine
from nvfp4_kernels.moe_route_quantize import moe_route_gather
from nvfp4_kernels.nvfp4 import BLOCK_SIZE
from nvfp4_kernels.tool.timed_graphs import captured, timed

TOKENS = tuple(2**power for power in range(14))
COLD_BYTES = 512 << 20  # of the weights that rotate: several times L2
CHECKED_TOKENS = 8  # whose results are compared
TOLERANCE = 0.01  # of norms: bfloat16 rounds by 2⁻⁹ three times
BYTES = 0.5 + 1 / 16  # of an element, with its share of the scale
Contender = Callable[[], Tensor]


@dataclass(frozen=True)
class Model:
    """A layer of experts: ``held`` of ``sizes.total`` on this GPU, ``top_k`` for each token."""

    sizes: ExpertSizes
    top_k: int

    @property
    def layer_bytes(self) -> float:
        """Bytes of all weights of one layer."""
        return 3 * self.sizes.held * self.sizes.h * self.sizes.i * BYTES


MODELS = {
    "qwen3-30b": Model(ExpertSizes(2048, 768, 128, 128), 8),
    "deepseek-ep8": Model(ExpertSizes(7168, 2048, 32, 256), 8),
    # With SiLU and without biases, which are none of a layer's bytes.
    "gpt-oss-120b": Model(ExpertSizes(2880, 2880, 128, 128), 4),
}
MARLIN_MULTIPLE = 128  # of the sizes that it takes


class Layer(NamedTuple):
    """Weights and choices of one layer; ``ids`` and ``weights`` of the tokens' slots."""

    w13: Fragments
    w2: Fragments
    ids: Tensor
    weights: Tensor
    expert_map: Tensor | None
    alphas: tuple[Tensor, Tensor]


def random_fragments(*batch: int, n: int, k: int) -> Fragments:
    """Random weights, of block scales that keep a product's sums near 1."""
    codes = torch.randint(0, 256, (*batch, n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.rand(*batch, n, k // BLOCK_SIZE, device="cuda") * k**-0.5
    return to_fragments(codes, scales.to(torch.float8_e4m3fn))


def popularity(choice: str, tokens: int, experts: int) -> Tensor:
    """Logarithms of how likely each token is to choose each expert, ``(tokens, experts)``."""
    each = torch.zeros(tokens, experts, device="cuda")
    if choice == "alike":
        return each
    ranks = torch.randperm(experts, device="cuda")  # the most popular expert is anywhere
    if choice == "zipf":
        return each - (1.0 + ranks).log()
    return each - 1e3 * ranks  # the same, whatever the noise


def random_layer(model: Model, tokens: int, choice: str) -> Layer:
    """Weights that no other layer has, and tokens that choose as told."""
    h, i, held, total, _ = model.sizes
    noise = (
        -torch.empty(tokens, total, device="cuda").exponential_().log()
    )  # Gumbel's: no expert twice
    chosen = (popularity(choice, tokens, total) + noise).topk(model.top_k).indices
    expert_map = None
    if held < total:
        expert_map = torch.full((total,), -1, dtype=torch.int32, device="cuda")
        expert_map[:held] = torch.arange(held, dtype=torch.int32, device="cuda")
    return Layer(
        random_fragments(held, 2, n=i, k=h),
        random_fragments(held, n=h, k=i),
        chosen.int(),
        torch.rand(tokens, model.top_k, device="cuda"),
        expert_map,
        (torch.ones(held, 2, device="cuda"), torch.ones(held, device="cuda")),
    )


def ours(model: Model, layer: Layer, x: Tensor) -> Tensor:
    """The layer on our kernels, as the plugin launches them."""
    h, i, held, total, _ = sizes = model.sizes
    tile_tokens = choose_tile_tokens(x.device, len(x), model.top_k, sizes)
    routing, a = moe_route_gather(x, layer.ids, held, tile_tokens, layer.expert_map)
    hidden, _ = grouped_silu_mul_gemm(
        a, None, routing.groups, *layer.w13, layer.alphas[0], None, i, None, SILU, x.dtype,
        global_experts=total,
    )  # fmt: skip
    out, _ = grouped_gemm(
        hidden,
        None,
        routing.groups,
        *layer.w2,
        layer.alphas[1],
        None,
        h,
        None,
        None,
        x.dtype,
        1,
        1,
        True,
        global_experts=total,
    )
    return moe_combine(out, routing.rows, layer.weights)


def error(model: Model, layer: Layer, x: Tensor) -> float:
    """Relative error of our result, of the norms, against float32 and decoded weights."""
    h, i, held, _, _ = model.sizes
    expected = torch.zeros(x.shape, device="cuda")
    for token, ids in enumerate(layer.ids.tolist()):
        for slot, expert in enumerate(ids):
            if expert >= held:
                continue  # of another rank
            w13 = decode_fragments(layer.w13.data[expert], layer.w13.scales[expert], i, h)
            gate, up = w13 @ x[token].float()
            hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype).float()
            w2 = decode_fragments(layer.w2.data[expert], layer.w2.scales[expert], h, i)
            expected[token] += layer.weights[token, slot] * (w2 @ hidden)
    found = ours(model, layer, x).float()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def marlin(model: Model, layers: int) -> Callable[[int, Layer, Tensor], Tensor] | None:
    """VLLM's Marlin kernels on random bytes, sizes rounded up as it wants; None without vLLM."""
    try:
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.scalar_type import scalar_types
    except ImportError as missing:
        print(f"Marlin is left out: {missing}")
        return None
    _, _, held, total, _ = model.sizes
    h, i = (-(-size // MARLIN_MULTIPLE) * MARLIN_MULTIPLE for size in model.sizes[:2])

    def weight(k: int, n: int) -> tuple[Tensor, Tensor]:
        shape = (held, k // 16, 2 * n)
        codes = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda")
        scales = torch.randint(30, 60, (held, k // 16, n), dtype=torch.uint8, device="cuda")
        return codes, scales.view(torch.float8_e4m3fn)

    weights = [(weight(h, 2 * i), weight(i, h)) for _ in range(layers)]
    scale = torch.ones(held, device="cuda")

    def run(number: int, layer: Layer, x: Tensor) -> Tensor:
        (w1, scales1), (w2, scales2) = weights[number]
        if x.shape[1] < h:
            x = torch.nn.functional.pad(x, (0, h - x.shape[1]))
        given: dict[str, Any] = {"global_num_experts": total, "expert_map": layer.expert_map}
        result: Tensor = fused_marlin_moe(
            x, w1, w2, None, None, scales1, scales2, layer.weights, layer.ids,
            scalar_types.float4_e2m1f.id, global_scale1=scale, global_scale2=scale, **given,
        )  # fmt: skip
        return result

    return run


def measure(name: str, tokens: tuple[int, ...], choice: str, rounds: int) -> bool:
    """Check, time and print one model; return whether all of it was right."""
    model = MODELS[name]
    layers = max(2, -(-COLD_BYTES // int(model.layer_bytes)))
    theirs, right = marlin(model, layers), True
    print(f"\n{name}: {model.layer_bytes / 1e6:.0f} MB a layer, {layers} layers in turn")
    for m in tokens:
        x = torch.randn(m, model.sizes.h, device="cuda").bfloat16()
        given = [random_layer(model, m, choice) for _ in range(layers)]
        first = given[0]._replace(
            ids=given[0].ids[:CHECKED_TOKENS], weights=given[0].weights[:CHECKED_TOKENS]
        )
        wrong = error(model, first, x[:CHECKED_TOKENS])
        graphs = {"ours": captured([partial(ours, model, each, x) for each in given], layers)}
        if theirs is not None:
            steps = [partial(theirs, number, each, x) for number, each in enumerate(given)]
            graphs["marlin"] = captured(steps, layers)
        medians = {who: statistics.median(taken) for who, taken in timed(graphs, rounds).items()}
        chosen = [int(each.ids[each.ids < model.sizes.held].unique().numel()) for each in given]
        rate = (
            model.layer_bytes * statistics.mean(chosen) / model.sizes.held / medians["ours"] / 1e6
        )
        beside = ""
        if "marlin" in medians:
            ratio = medians["marlin"] / medians["ours"]
            beside = f"  marlin {medians['marlin']:8.1f} us  x{ratio:.2f}"
        print(
            f"  {m:5} tokens  ours {medians['ours']:8.1f} us  {rate:5.2f} TB/s{beside}"
            f"  {'error' if wrong < TOLERANCE else 'WRONG by'} {wrong:.1e}", flush=True,
        )  # fmt: skip
        right = right and wrong < TOLERANCE
    return right


def main() -> int:
    """Check, time and print all models; 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["qwen3-30b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--choice", choices=["alike", "zipf", "same"], default="alike")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    cuda_device()
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, {properties.multi_processor_count} SMs, torch {torch.__version__}")
    right = [measure(name, tuple(given.tokens), given.choice, given.rounds) for name in given.model]
    return int(not all(right))


if __name__ == "__main__":
    with refusals():
        sys.exit(main())
