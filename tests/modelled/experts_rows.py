"""The modelled time of the row kernels around a mixture of experts' products on a B200.

    python -m tests.modelled.experts_rows                        the models below, 1 to 1024 tokens
    python -m tests.modelled.experts_rows --model qwen3-30b --tokens 64 --both

A batch's tokens choose experts at random, each with equal probability. Some of each grid's CTAs run
in the emulator, with their work in the whole grid; the time model (``tests/emulator/timing``)
builds the grid from them. Nothing here was measured on a B200.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tests.emulator.timing import B200_TIMING, chain
from tests.emulator.timing.supply import Operand
from tests.modelled.experts_shape import MODELS, TOKENS, Shape
from tests.modelled.layer import layers
from tests.modelled.traces import Traced, Tracer, aligned, operand

if TYPE_CHECKING:
    from torch import Tensor

    from nvfp4_kernels.moe.dispatch.call import Source

TRACED_CTAS = 160  # per grid, at most


class RowsSm100:
    """Traced launches of a layer, other than its products.

    Methods take the names of the operand that a launch reads and of the operand that it writes.

    Args:
        tracer: tracer of ``"sm_100"``.
        shape: shape of the layer.
        tokens: number of tokens of the batch.
        tile_tokens: number of rows of a token tile; None: the plugin's choice.
    """

    def __init__(
        self, tracer: Tracer, shape: Shape, tokens: int, tile_tokens: int | None = None
    ) -> None:
        import torch

        from nvfp4_kernels.gemm.sm100.choose_grouped import choose_tile_tokens
        from nvfp4_kernels.moe.route.reference import moe_route
        from nvfp4_kernels.moe.routing import Routing

        self._tracer = tracer
        self._shape = shape
        self._tile_tokens = tile_tokens or choose_tile_tokens(
            tokens, shape.top_k, shape.local, shape.experts, shape.intermediate, shape.hidden
        )
        self._ids = aligned(torch.tensor(shape.ids(tokens), dtype=torch.int32))
        self._map = None
        if shape.local < shape.experts:
            self._map = aligned(torch.arange(shape.experts, dtype=torch.int32))
            self._map[shape.local :] = -1
        parts = moe_route(self._ids, self._map, shape.local, self._tile_tokens)
        self._routing = Routing(*map(aligned, parts))

    def before_products(self, read: str, written: str) -> list[Traced]:
        """Launches from the router's logits to NVFP4 in padded expert blocks, as in the plugin."""
        if self.is_one_launch(topk=True):
            return [self.topk_route_quantize(read, written)]
        return [self.topk(), *self.after_topk(read, written)]

    def after_topk(self, read: str, written: str) -> list[Traced]:
        """Launches after top-k, where vLLM computes top-k."""
        if self.is_one_launch(topk=False):
            return [self.route_quantize(read, written)]
        return [self.route(), self.quantize(read, written)]

    def is_one_launch(self, topk: bool) -> bool:
        """Whether routing and quantisation are one launch, with top-k too if ``topk``."""
        from nvfp4_kernels.moe.dispatch.choose import choose_rows, fuse_ids, fuse_logits
        from nvfp4_kernels.sm100.limits import SMS

        (tokens, top_k), e = self._ids.shape, self._shape
        rows = choose_rows(tokens * top_k, e.hidden, 2, False, SMS)
        sizes = e.local, self._tile_tokens, rows.threads
        if topk:
            return fuse_logits((tokens, top_k), *sizes, True) is not None
        return fuse_ids(tokens * top_k, *sizes) is not None

    def topk(self) -> Traced:
        """Launch that computes top-k of each token's logits."""
        from nvfp4_kernels.moe.router import Router
        from nvfp4_kernels.moe.topk.kernel import moe_topk

        logits = self._logits()
        run = partial(moe_topk, logits, None, None, Router(self._shape.top_k))
        written = {"ids": 4.0 * self._ids.numel()}
        return self._traced(run, [operand("logits", logits, logits.nbytes)], written)

    def topk_route_quantize(self, read: str, written: str) -> Traced:
        """Launch of top-k, routing into padded expert blocks, and quantisation of the tokens."""
        from nvfp4_kernels.moe.dispatch.call import Logits
        from nvfp4_kernels.moe.router import Router

        logits, router = self._logits(), Router(self._shape.top_k)
        sizes = self._shape.local, self._tile_tokens
        source = Logits(logits, router, *sizes, self._map)
        return self._dispatch(source, read, written, [operand("logits", logits, logits.nbytes)])

    def _dispatch(
        self, source: "Source", read: str, written: str, operands: Sequence[Operand] = ()
    ) -> Traced:
        """Launch that quantises each token into its rows, from any source."""
        import torch

        from nvfp4_kernels.formats.output import Static
        from nvfp4_kernels.moe.dispatch.call import DispatchCall
        from nvfp4_kernels.moe.dispatch.launch import moe_dispatch

        x = self._x()
        run = partial(moe_dispatch, DispatchCall(x, source, Static(torch.tensor(1.0))))
        return self._traced(run, [self._tokens(read, x), *operands], self._written(written))

    def _logits(self) -> "Tensor":
        """Logits whose top-k experts are those of the batch, in the order of the slots."""
        import torch

        tokens, top_k = self._ids.shape
        logits = torch.zeros(tokens, self._shape.experts)
        order = torch.arange(top_k, 0, -1.0).expand(tokens, top_k)
        return aligned(logits.scatter_(1, self._ids.long(), order).bfloat16())

    def route_quantize(self, read: str, written: str) -> Traced:
        """Launch that routes the batch into padded expert blocks and quantises its tokens."""
        from nvfp4_kernels.moe.dispatch.call import Ids

        source = Ids(self._ids, self._shape.local, self._tile_tokens, self._map)
        return self._dispatch(source, read, written)

    def route(self) -> Traced:
        """Launch that routes the batch into padded expert blocks."""
        from nvfp4_kernels.moe.route.kernel import moe_route

        ids = self._ids
        run = partial(moe_route, ids, self._map, self._shape.local, self._tile_tokens)
        return self._traced(run, [operand("ids", ids, ids.nbytes)], {"routing": 8.0 * len(ids)})

    def quantize(self, read: str, written: str) -> Traced:
        """Launch that quantises each token into its rows."""
        return self._dispatch(self._routing, read, written)

    def combine(self, read: str, written: str) -> Traced:
        """Launch that combines each token's rows."""
        import torch

        from nvfp4_kernels.moe.combine.kernel import moe_combine

        slots, rows = self._routing.slots, self._routing.rows
        y = aligned(torch.zeros(*slots.shape, self._shape.hidden, dtype=torch.bfloat16))
        run = partial(moe_combine, y, rows, aligned(torch.ones(rows.shape)), torch.bfloat16)
        moved = 2.0 * int((rows >= 0).sum()) * self._shape.hidden
        return self._traced(
            run, [operand(read, y, moved)], {written: 2.0 * len(rows) * self._shape.hidden}
        )

    def _x(self) -> "Tensor":
        import torch

        return aligned(torch.zeros(len(self._ids), self._shape.hidden, dtype=torch.bfloat16))

    def _tokens(self, name: str, x: "Tensor") -> Operand:
        """Operand of the tokens that have a slot on this rank, as no launch reads other tokens."""
        return operand(name, x, 2.0 * int((self._routing.rows >= 0).any(1).sum()) * x.shape[1])

    def _written(self, name: str) -> dict[str, float]:
        k, used = self._shape.hidden, int(self._routing.groups[0])
        data = used * self._tile_tokens * k / 2
        return {name: data, f"{name} scales": used * k * 8.0, "routing": 8.0 * len(self._ids)}

    def _traced(
        self, run: Callable[[], object], operands: list[Operand], writes: dict[str, float]
    ) -> Traced:
        launched, registers = self._tracer.run(run, TRACED_CTAS)
        clusters = math.prod(launched.grid) // launched.cluster_size
        return Traced(launched, clusters, tuple(operands), writes, registers)


def microseconds(launches: Sequence[Traced]) -> float:
    """Microseconds of consecutive launches, from the start of the first; L2 is empty at first."""
    return chain(layers(launches, 1), B200_TIMING).microseconds


def said(rows: RowsSm100, both: bool) -> str:
    """Times of the launches of one batch."""
    before, after = rows.before_products("hidden", "x"), rows.after_topk("hidden", "x")
    parts = [f"{'+'.join('launch' for _ in before)} {microseconds(before):.2f}"]
    if len(before) > 1:
        parts[0] += " (" + " + ".join(f"{microseconds([each]):.2f}" for each in before) + " alone)"
    if both:
        parts[0] += f", after vLLM's top-k {microseconds(after):.2f}"
        launches = [rows.topk(), rows.route(), rows.quantize("hidden", "x")]
        parts[0] += f", in three {microseconds(launches):.2f}"
    return ", ".join([*parts, f"combine {microseconds([rows.combine('y', 'hidden')]):.2f}"])


def main() -> None:
    """Print a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument(
        "--both", action="store_true", help="after vLLM's top-k, and in three launches, too"
    )
    given = parser.parse_args()
    tracer = Tracer("sm_100")
    for name in given.model or MODELS:
        for tokens in given.tokens:
            rows = RowsSm100(tracer, MODELS[name], tokens)
            print(f"{name}, {tokens} tokens: {said(rows, given.both)} µs", flush=True)


if __name__ == "__main__":
    main()
