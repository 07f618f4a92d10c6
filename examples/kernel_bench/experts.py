"""Benchmark of a layer of NVFP4 experts against vLLM's kernels on this machine's GPU.

    python -m examples.kernel_bench.experts                          Qwen3-30B, 1 to 8192 tokens
    python -m examples.kernel_bench.experts --model deepseek-ep8 --tokens 1 64
    python -m examples.kernel_bench.experts --choice same            same experts for all tokens

Weights have 4 bits, activations 16. The timed launches take the router's choice of experts and
return the weighted sum for each token. Tokens choose experts at random, all equally likely or as
``--choice`` says. Each contender's launches are captured in a CUDA graph; they use the weights and
choices of several layers in turn, so that L2 is always cold. Graphs replay in turn, and medians are
printed. Before that, the first tokens' results are compared with the float32 result of the decoded
weights.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from examples.command_line import refusals
from examples.kernel_bench.expert_contenders import (
    CONTENDERS,
    Choice,
    ExpertWeights,
    make_contenders,
)
from examples.kernel_bench.machine import cuda_device
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE, Nvfp4Tensor
from nvfp4_kernels.gemm.grouped.tile_tokens import ExpertSizes
from nvfp4_kernels.tool.timed_graphs import captured, timed

TOKENS = tuple(2**power for power in range(14))
COLD_BYTES = 512 << 20  # rotating weights: several times L2
CHECKED_TOKENS = 8  # tokens with compared results
TOLERANCE = 0.01  # relative, on norms: bfloat16 rounds by 2⁻⁹ three times
BYTES = 0.5 + 1 / 16  # per element, with its share of the scale


@dataclass(frozen=True)
class Model:
    """Layer of experts of one model.

    Attributes:
        sizes: sizes of the experts; this GPU has ``sizes.held`` of ``sizes.total`` experts.
        top_k: number of experts per token.
    """

    sizes: ExpertSizes
    top_k: int

    @property
    def layer_bytes(self) -> float:
        """Bytes of the local experts' codes and block scales in one layer."""
        return 3 * self.sizes.held * self.sizes.h * self.sizes.i * BYTES


MODELS = {
    "qwen3-30b": Model(ExpertSizes(2048, 768, 128, 128), 8),
    "deepseek-ep8": Model(ExpertSizes(7168, 2048, 32, 256), 8),
    # With SiLU and without biases, which do not count among a layer's bytes.
    "gpt-oss-120b": Model(ExpertSizes(2880, 2880, 128, 128), 4),
}


def random_weights(sizes: ExpertSizes) -> ExpertWeights:
    """Random codes and block scales; products with unit noise have an RMS near 1."""
    h, i, held, _, _ = sizes

    def matrix(*shape: int) -> tuple[Tensor, Tensor]:
        *rows, k = shape
        codes = torch.randint(0, 256, (*rows, k // 2), dtype=torch.uint8, device="cuda")
        scales = torch.empty(*rows, k // BLOCK_SIZE, device="cuda").uniform_(0.5, 1)
        return codes, scales.to(torch.float8_e4m3fn)

    return ExpertWeights(*matrix(held, 2, i, h), *matrix(held, h, i), (h**-0.5 / 2, i**-0.5 / 2))


def popularity(choice: str, tokens: int, experts: int) -> Tensor:
    """Log-probability, up to a constant, with which tokens choose experts: ``(tokens, experts)``.

    ``choice`` names the distribution, as ``--choice`` does.
    """
    each = torch.zeros(tokens, experts, device="cuda")
    if choice == "alike":
        return each
    ranks = torch.randperm(experts, device="cuda")  # the most popular expert has a random index
    if choice == "zipf":
        return each - (1.0 + ranks).log()
    return each - 1e3 * ranks  # the same experts despite the noise


def random_choice(model: Model, tokens: int, choice: str) -> Choice:
    """Random experts of the tokens, by the distribution ``choice``, and random routing weights."""
    _, _, held, total, _ = model.sizes
    gumbel = -torch.empty(tokens, total, device="cuda").exponential_().log()  # no expert twice
    chosen = (popularity(choice, tokens, total) + gumbel).topk(model.top_k).indices
    expert_map = None
    if held < total:
        expert_map = torch.full((total,), -1, dtype=torch.int32, device="cuda")
        expert_map[:held] = torch.arange(held, dtype=torch.int32, device="cuda")
    return Choice(chosen.int(), torch.rand(tokens, model.top_k, device="cuda"), expert_map)


def exact(model: Model, weights: ExpertWeights, choice: Choice, x: Tensor) -> Tensor:
    """Sum of the local experts' results from decoded weights, in float32.

    The second product's input is rounded to the dtype of ``x``.
    """
    expected = torch.zeros(x.shape, device="cuda")
    of_w13, of_w2 = weights.global_scales
    for token, ids in enumerate(choice.ids.tolist()):
        for slot, expert in enumerate(ids):
            if expert >= model.sizes.held:
                continue  # expert of another rank
            w13 = decoded(weights.w13[expert], weights.w13_scales[expert], of_w13)
            gate, up = w13 @ x[token].float()
            hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype).float()
            w2 = decoded(weights.w2[expert], weights.w2_scales[expert], of_w2)
            expected[token] += choice.weights[token, slot] * (w2 @ hidden)
    return expected


def decoded(codes: Tensor, scales: Tensor, global_scale: float) -> Tensor:
    """Values of an NVFP4 matrix, float32."""
    return Nvfp4Tensor(codes, scales, torch.tensor(global_scale, device="cuda")).dequantize()


def measure(
    name: str, tokens: Sequence[int], choice: str, rounds: int, contenders: Sequence[str]
) -> bool:
    """Check, time and print one model; return whether all results are right."""
    model = MODELS[name]
    layers = max(2, -(-COLD_BYTES // int(model.layer_bytes)))
    made, right = make_contenders(contenders, model.sizes, model.top_k), True
    first, *others = (random_weights(model.sizes) for _ in range(layers))
    operands = {who: [one.operands(each) for each in (first, *others)] for who, one in made.items()}
    del others
    print(f"\n{name}: {model.layer_bytes / 1e6:.0f} MB a layer, {layers} layers in turn")
    for m in tokens:
        x = torch.randn(m, model.sizes.h, device="cuda").bfloat16()
        choices = [random_choice(model, m, choice) for _ in range(layers)]
        some = choices[0]._replace(
            ids=choices[0].ids[:CHECKED_TOKENS], weights=choices[0].weights[:CHECKED_TOKENS]
        )
        expected = exact(model, first, some, x[:CHECKED_TOKENS])
        errors, graphs = {}, {}
        for who, one in made.items():
            found = one.launch(operands[who][0], choices[0], x)[:CHECKED_TOKENS].float()
            errors[who] = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
            steps = [
                partial(one.launch, held, chosen, x)
                for held, chosen in zip(operands[who], choices, strict=True)
            ]
            graphs[who] = captured(steps, layers)
        medians = {who: statistics.median(taken) for who, taken in timed(graphs, rounds).items()}
        chosen = [int(each.ids[each.ids < model.sizes.held].unique().numel()) for each in choices]
        read = model.layer_bytes * statistics.mean(chosen) / model.sizes.held
        print(line(m, medians, errors, read), flush=True)
        right = right and max(errors.values()) < TOLERANCE
    return right


def line(tokens: int, medians: dict[str, float], errors: dict[str, float], read: float) -> str:
    """Line of the table: for each contender microseconds, comparison, and relative error in norm.

    The comparison is the ratio to our kernels' time. Our kernels, or all contenders if ours are not
    measured, have the rate of ``read`` bytes instead.
    """
    parts = [f"  {tokens:5} tokens"]
    for who, taken in medians.items():
        beside = f"{read / taken / 1e6:5.2f} TB/s"
        if who != "ours" and "ours" in medians:
            beside = f"x{taken / medians['ours']:.2f}"
        wrong = "" if errors[who] < TOLERANCE else "WRONG "
        parts.append(f"{who} {taken:8.1f} us {beside} {wrong}({errors[who]:.0e})")
    return "  ".join(parts)


def main() -> int:
    """Check, time and print all models; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["qwen3-30b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--choice", choices=["alike", "zipf", "same"], default="alike")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    cuda_device()
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, {properties.multi_processor_count} SMs, torch {torch.__version__}")
    right = [
        measure(name, given.tokens, given.choice, given.rounds, given.contenders)
        for name in given.model
    ]
    return int(not all(right))


if __name__ == "__main__":
    with refusals():
        sys.exit(main())
