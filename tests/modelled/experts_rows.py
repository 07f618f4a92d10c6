"""The modelled time of what surrounds a mixture of experts' products on a B200: rows of tokens.

    python -m tests.modelled.experts_rows                        the models below, 1 to 1024 tokens
    python -m tests.modelled.experts_rows --model qwen3-30b --tokens 64

A batch's tokens choose their experts at random, all alike. Of routing all of the grid runs in the
emulator, of the other launches some CTAs, which the time model (``tests/emulator/timing``) repeats.
CTAs that find no tile in use are left out. Nothing here was measured on a B200.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.emulator.timing import B200_TIMING, Link, chain, model
from tests.modelled.traces import Traced, Tracer, operand

if TYPE_CHECKING:
    from torch import Tensor

    from nvfp4_kernels.routing import Routing

TOKENS = (1, 8, 64, 256, 1024)
NVFP4 = 0.5 + 1 / 16  # bytes of an element, with its share of the scale
ELEMENT = 2  # bytes of an activation
DRAWS = 9  # of a batch's experts, of which the most ordinary one is taken
TRACED_CTAS = 8  # of a grid whose CTAs are alike
GLOBAL_SCALE = 0.01


@dataclass(frozen=True)
class Experts:
    """A mixture of experts as one rank has it.

    Attributes:
        experts, local: of all ranks, and of this one.
        top_k: experts of a token.
        hidden: elements of a token.
    """

    experts: int
    local: int
    top_k: int
    hidden: int


MODELS = {
    "deepseek-v3-ep8": Experts(256, 32, 8, 7168),
    "qwen3-30b": Experts(128, 128, 8, 2048),
}


class RowsSm100:
    """Traced launches of the row-wise kernels of one layer at one number of tokens.

    Args:
        tracer: for ``"sm_100"``.
        shape: of the layer.
        tokens: of the batch.
        tile_tokens: rows of a token tile; None: as many as an expert is expected to get.
    """

    def __init__(
        self, tracer: Tracer, shape: Experts, tokens: int, tile_tokens: int | None = None
    ) -> None:
        import torch

        from nvfp4_kernels.moe_route import reference
        from nvfp4_kernels.routing import Routing, tile_tokens_of

        self._tracer, self._shape, self._tokens = tracer, shape, tokens
        self._tile_tokens = tile_tokens or tile_tokens_of(tokens, shape.top_k, shape.experts)
        self._ids = _typical_ids(shape, tokens)
        self._map = None
        if shape.local < shape.experts:
            self._map = torch.full((shape.experts,), -1, dtype=torch.int32)
            self._map[: shape.local] = torch.arange(shape.local, dtype=torch.int32)
        self._x = torch.zeros(tokens, shape.hidden, dtype=torch.bfloat16)
        parts = reference.moe_route(self._ids, self._map, shape.local, self._tile_tokens)
        self.routing = Routing(*parts)

    def one_launch(self) -> bool:
        """Whether routing and quantising are one."""
        from nvfp4_kernels.moe_route_quantize.choose import is_one_launch

        slots, threads = self._ids.numel(), self._tile().threads
        return is_one_launch(slots, self._tile_tokens, threads)

    def before_products(self) -> list[Traced]:
        """Launches from the chosen experts to NVFP4 in token tiles."""
        if self.one_launch():
            return [self.route_quantize()]
        return [self.route(), self.quantize()]

    def route(self) -> Traced:
        """Sort of the slots."""
        from nvfp4_kernels import moe_route

        traced, registers = self._tracer.run(
            lambda: moe_route(self._ids, self._shape.local, self._tile_tokens, self._map)
        )
        operands = (operand("topk ids", self._ids, float(self._ids.nbytes)),)
        return Traced(traced, 1, operands, {"routing": self._routing_bytes()}, registers)

    def quantize(self) -> Traced:
        """Quantisation of the tiles in use: one tile's CTAs are run, each with as many turns."""
        import torch

        from nvfp4_kernels import moe_quantize

        turns, ctas = self._turns()
        of_tile = turns // int(self.routing.groups[0])
        each = math.ceil(turns / ctas)
        one = self._first_tile()
        scale = torch.tensor(GLOBAL_SCALE)
        with self._ctas("nvfp4_kernels.moe_quantize.sm100", max(1, of_tile // each)):
            traced, registers = self._tracer.run(lambda: moe_quantize(self._x, one, scale))
        operands = (
            operand("x", self._x, float(self._x.nbytes)),
            operand("routing", one.slots, self._routing_bytes()),
        )
        return Traced(traced, min(turns, ctas), operands, self._written(), registers)

    def route_quantize(self) -> Traced:
        """Both in one launch: one of the CTAs that are run writes the routing."""
        import torch

        from nvfp4_kernels import moe_route_quantize
        from nvfp4_kernels.moe_route_quantize.choose import ctas_of
        from nvfp4_kernels.sm100.limits import SMS

        turns = self._turns()[0]
        of_tile = turns // max(1, int(self.routing.groups[0]))
        ctas = ctas_of(of_tile * len(self.routing.slots), SMS)  # those without a turn sort, too
        busy = min(turns, ctas)
        scale = torch.tensor(GLOBAL_SCALE)
        few = min(busy, TRACED_CTAS)
        with self._ctas("nvfp4_kernels.moe_route_quantize.sm100", few), self._limited(busy):
            traced, registers = self._tracer.run(
                lambda: moe_route_quantize(
                    self._x, self._ids, self._shape.local, self._tile_tokens, scale, self._map
                )
            )
        operands = (
            operand("topk ids", self._ids, float(self._ids.nbytes)),
            operand("x", self._x, float(self._x.nbytes)),
        )
        writes = self._written() | {"routing": self._routing_bytes()}
        return Traced(traced, ctas + 1, operands, writes, registers)

    def combine(self) -> Traced:
        """Sum over slots of rows that the second product has written."""
        import torch

        from nvfp4_kernels import moe_combine

        count = min(self._tokens, TRACED_CTAS)
        used = int(self.routing.groups[0]) or 1
        y = torch.zeros(used, self._tile_tokens, self._shape.hidden, dtype=torch.bfloat16)
        rows = self.routing.rows[:count].clone()
        weights = torch.ones(rows.shape)
        traced, registers = self._tracer.run(lambda: moe_combine(y, rows, weights))
        reached = int((self.routing.rows >= 0).sum())
        row_bytes = self._shape.hidden * ELEMENT
        operands = (
            operand("y", y, float(reached * row_bytes)),
            operand("routing rows", rows, float(self.routing.rows.nbytes)),
        )
        clusters = traced.clusters // count * self._tokens
        return Traced(
            traced, clusters, operands, {"out": float(self._tokens * row_bytes)}, registers
        )

    def _tile(self) -> Any:
        from nvfp4_kernels.moe_quantize.choose import choose_config
        from nvfp4_kernels.sm100.limits import SMS

        return choose_config(self._ids.numel(), self._shape.hidden, ELEMENT, False, SMS)

    def _turns(self) -> tuple[int, int]:
        """Turns that tiles in use take, and CTAs of the grid."""
        from nvfp4_kernels.moe_quantize.choose import ctas_of, turns_of_tile
        from nvfp4_kernels.sm100.limits import SMS

        tile = self._tile()
        each = turns_of_tile(tile, self._tile_tokens, self._shape.hidden)
        most = each * len(self.routing.slots)
        return max(1, int(self.routing.groups[0])) * each, ctas_of(most, tile.threads, SMS)

    def _first_tile(self) -> "Routing":
        """A routing that says that one tile is in use."""
        groups = self.routing.groups.clone()
        groups[0] = 1
        return self.routing._replace(groups=groups)

    def _written(self) -> dict[str, float]:
        rows = int(self.routing.groups[0]) * self._tile_tokens
        return {"tiles": rows * self._shape.hidden * NVFP4}

    def _routing_bytes(self) -> float:
        used = int(self.routing.groups[0])
        return float(4 * used * (1 + self._tile_tokens) + self.routing.rows.nbytes)

    @contextmanager
    def _ctas(self, module: str, count: int) -> Iterator[None]:
        """Launch so many CTAs for rows."""
        with patch.object(import_module(module), "ctas_of", lambda *_: count):
            yield

    @contextmanager
    def _limited(self, busy: int) -> Iterator[None]:
        """Have each of the few CTAs that run take as many turns as one of ``busy`` takes."""
        from nvfp4_kernels.moe_route_quantize import sm100

        traced = min(busy, TRACED_CTAS)
        each = math.ceil(self._turns()[0] / busy)

        def take(self: Any, arguments: Any, slots: Any, turns: Any) -> None:
            import cutlass

            given(self, arguments, slots, cutlass.min(turns, traced * each))

        given = sm100.MoeRouteQuantizeSm100._take_turns
        with patch.object(sm100.MoeRouteQuantizeSm100, "_take_turns", take):
            yield


def _typical_ids(shape: Experts, tokens: int) -> "Tensor":
    """Experts of a batch with as many slots on this rank as are expected."""
    import torch

    expected = tokens * shape.top_k * shape.local / shape.experts
    drawn = []
    for seed in range(DRAWS):
        scores = torch.rand(tokens, shape.experts, generator=torch.Generator().manual_seed(seed))
        drawn.append(scores.topk(shape.top_k).indices.int())
    return min(drawn, key=lambda ids: abs(int((ids < shape.local).sum()) - expected))


def microseconds(launches: Sequence[Traced]) -> float:
    """Time of launches in a row, from the start of the first on."""
    if len(launches) == 1:
        [only] = launches
        return model(
            only.launch,
            B200_TIMING,
            clusters=only.clusters,
            footprint=0.0,
            registers=only.registers,
        ).microseconds
    links = [Link(t.launch, t.clusters, t.operands, t.writes, t.registers) for t in launches]
    return chain(links, B200_TIMING).microseconds


def main() -> None:
    """Print a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--both", action="store_true", help="two launches beside the one, too")
    given = parser.parse_args()
    tracer = Tracer("sm_100")
    for name in given.model or MODELS:
        for tokens in given.tokens:
            rows = RowsSm100(tracer, MODELS[name], tokens)
            before = rows.before_products()
            said = f"{'+'.join('launch' for _ in before)} {microseconds(before):.2f}"
            if given.both and rows.one_launch():
                said += f" (in two {microseconds([rows.route(), rows.quantize()]):.2f})"
            said += f", combine {microseconds([rows.combine()]):.2f}"
            print(f"{name}, {tokens} tokens: {said} µs", flush=True)


if __name__ == "__main__":
    main()
