"""Modelled time of both GEMMs of a mixture of experts on an H200, against the lower bound.

    python -m tests.modelled.grouped_sm90                       Qwen3-30B, 1 to 256 tokens
    python -m tests.modelled.grouped_sm90 --tokens 64 --tile-tokens 16
    python -m tests.modelled.grouped_sm90 --model deepseek-ep8 --tokens 2
    python -m tests.modelled.grouped_sm90 --model deepseek-ep8 --unaware

Tokens choose all experts with equal probability. With ``--unaware`` a rank's tiles are chosen as if
the rank owned all slots. The tiles of the busiest SM run in the emulator, each of a different
expert; the time model builds the grid from them. With split K the grid has idle CTAs, as its size
allows for the slots of all ranks. A chain of layers with separate weights is modelled too: each
launch starts while its predecessor ends. Routing, gathering and summing are left out. Nothing here
was measured.
"""

import argparse
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.emulator.timing import chain
from tests.modelled.layer import MEASURED_H200, layers
from tests.modelled.layer_sm90 import ELEMENT
from tests.modelled.traces import Traced, Tracer, operand

if TYPE_CHECKING:
    from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile

TOKENS = (1, 8, 64, 256)
WEIGHT_BYTES = 0.5 + 1 / 16  # per element, with its share of the scale


@dataclass(frozen=True)
class Experts:
    """Experts of a layer, ``top_k`` of them for each token.

    Attributes:
        experts, held: experts of all ranks, and of this rank.
        hidden: width of the layer's input and result.
        inner: width between the products.
    """

    experts: int
    held: int
    top_k: int
    hidden: int
    inner: int

    def used(self, tokens: int, tile_tokens: int) -> float:
        """Average number of used token tiles on this rank.

        If ``tile_tokens`` is ``tokens``, this is the number of experts hit on this rank.
        """
        p = self.top_k / self.experts
        chances = (math.comb(tokens, c) * p**c * (1 - p) ** (tokens - c) for c in range(tokens + 1))
        return self.held * sum(
            chance * math.ceil(count / tile_tokens) for count, chance in enumerate(chances)
        )

    def weight_bytes(self, tokens: int, weights: int) -> float:
        """Bytes of weights that a product reads: those of the experts hit."""
        hit = self.used(tokens, tokens)
        return hit * weights * self.hidden * self.inner * WEIGHT_BYTES


MODELS = {
    "qwen3-30b": Experts(experts=128, held=128, top_k=8, hidden=2048, inner=768),
    "deepseek-ep8": Experts(experts=256, held=32, top_k=8, hidden=7168, inner=2048),
}


class GroupedSm90:
    """Launches of one layer's experts for one number of tokens.

    Args:
        tracer: tracer of ``"sm_90"``.
        shape: shape of the experts.
        tokens: number of tokens in the batch.
        tile_tokens: number of tokens of a tile; 0: the chooser's value.
        aware: whether products know the number of experts on all ranks.
    """

    def __init__(
        self,
        tracer: Tracer,
        shape: Experts,
        tokens: int,
        tile_tokens: int = 0,
        aware: bool = True,
    ) -> None:
        from nvfp4_kernels.gemm.sm90.choose_grouped import choose_tile_tokens

        self._tracer = tracer
        self._shape = shape
        self._tokens = tokens
        self._aware = aware
        self.tile_tokens = tile_tokens or choose_tile_tokens(
            tokens, shape.top_k, shape.held, shape.experts, shape.inner, shape.hidden
        )

    @property
    def room(self) -> int:
        """Number of allocated token tiles: enough if all slots belong to this rank."""
        from nvfp4_kernels.moe.routing import max_tiles

        return max_tiles(self._tokens * self._shape.top_k, self._shape.held, self.tile_tokens)

    def config(self, weights: int) -> "tuple[Tile, EpilogueConfig]":
        """Tile and epilogue by the chooser: first product if ``weights`` is 2, second if 1."""
        from nvfp4_kernels.activation import SILU
        from nvfp4_kernels.gemm.sm90.choose_grouped import GroupedProblem, choose_grouped_config
        from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig

        shape = self._shape
        n, k = (shape.inner, shape.hidden) if weights == 2 else (shape.hidden, shape.inner)
        everywhere = shape.experts if self._aware else None
        problem = GroupedProblem(self.room, self.tile_tokens, shape.held, n, k, weights, everywhere)
        output = EpilogueConfig(activation=SILU if weights == 2 else None)
        tile, output = choose_grouped_config(problem, output)
        # Routing precedes the first product, and is visible before the second.
        return replace(tile, routed_before=weights == 1), output

    def product(self, weights: int) -> Traced:
        """Traced launch of the first product if ``weights`` is 2, of the second product if 1."""
        import torch

        from nvfp4_kernels.formats.fragments import fragment_shapes
        from nvfp4_kernels.gemm.sm90.kernel import GemmArguments, WeightOnlyGemm
        from nvfp4_kernels.gemm.sm90.tile import SLICED_TOKENS
        from nvfp4_kernels.runtime.compile import launch
        from nvfp4_kernels.sm90.limits import SMS

        tile, output = self.config(weights)
        shape = self._shape
        n, k = (shape.inner, shape.hidden) if weights == 2 else (shape.hidden, shape.inner)
        used = self._shape.used(self._tokens, tile.tokens)
        total = used * math.ceil(n / tile.rows)
        # Persistent CTAs share the tiles of their SM; split CTAs have one tile each.
        clusters, count, idle = math.ceil(total), 1, 0
        if tile.parts > 1:
            idle = max(0, self.room * math.ceil(n / tile.rows) - clusters)
        else:
            clusters = min(clusters, SMS * tile.ctas_per_sm)
            count = math.ceil(total / SMS) if clusters > SMS else 1
        room = count + bool(idle)
        x = torch.zeros(room, tile.tokens, k, dtype=torch.bfloat16)
        out = torch.zeros(room, tile.tokens, tile.rows, dtype=torch.bfloat16)
        data, scales = (
            torch.zeros(count, weights, *each, dtype=torch.uint8)
            for each in fragment_shapes(tile.rows, k)
        )
        groups = torch.tensor([count, *range(room)], dtype=torch.int32)
        arguments = GemmArguments(
            x=x,
            w1=data,
            sfw1=scales,
            w2=None,
            sfw2=None,
            out=out,
            alpha=torch.ones(count, weights),
            bias=None,
            m=room * tile.tokens,
            n=tile.rows,
            k=k,
            sms=1,
            shard_ends=(0,) * 7,
            groups=groups,
        )
        traced, registers = self._tracer.run(
            lambda: launch(WeightOnlyGemm(tile, output), arguments)
        )
        read, written = ("x", "h") if weights == 2 else ("h", "y")
        weight = shape.weight_bytes(self._tokens, weights)
        streamed = tile.tokens <= SLICED_TOKENS  # the loader's hint
        tokens = used * tile.tokens * ELEMENT
        operands = (
            operand(read, x, tokens * k),
            operand(f"weights {weights}", data, weight * 8 / 9, streamed),
            operand(f"scales {weights}", scales, weight / 9, streamed),
            operand(f"groups {weights}", groups, 4 + 4 * used),
        )
        repeats = (0,) * clusters + (1,) * idle if idle else ()
        return Traced(traced, clusters + idle, operands, {written: tokens * n}, registers, repeats)


def described(tile: "Tile") -> str:
    """Description of a tile's shape."""
    parts = f", {tile.slices} slices" if tile.slices > 1 else ""
    return f"{tile.rows} rows{parts}, {tile.k_tiles} K tiles, {tile.ctas_per_sm} to an SM"


def main() -> None:
    """Print a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b")
    parser.add_argument("--unaware", action="store_true", help="of the other ranks")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--tile-tokens", type=int, default=0, help="the chooser's where not given")
    given = parser.parse_args()
    tracer, p, shape = Tracer("sm_90"), MEASURED_H200, MODELS[given.model]
    for tokens in given.tokens:
        start = time.monotonic()
        layer = GroupedSm90(tracer, shape, tokens, given.tile_tokens, not given.unaware)
        products = [layer.product(weights) for weights in (2, 1)]
        alone = [chain(layers([each], 3), p).period(1) for each in products]
        both = chain(layers(products, 2), p).period(2)
        least = [
            shape.weight_bytes(tokens, weights) / (p.hbm_bandwidth * 1e6) for weights in (2, 1)
        ]
        words = [described(layer.config(weights)[0]) for weights in (2, 1)]
        print(
            f"{tokens} tokens, tiles of {layer.tile_tokens}, µs: gate and up {alone[0]:.1f} "
            f"({words[0]}), down {alone[1]:.1f} ({words[1]}), both {both:.1f}, "
            f"least {sum(least):.1f} [{time.monotonic() - start:.0f} s]",
            flush=True,
        )


if __name__ == "__main__":
    main()
