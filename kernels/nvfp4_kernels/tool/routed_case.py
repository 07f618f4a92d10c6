"""Cases of the ops that route, permute and combine experts' tokens, compared bit by bit.

Only routing weights, which are computed with exponentials, are compared within a bound.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import nvfp4_kernels
from nvfp4_kernels.formats.output import Output, PerToken, Static
from nvfp4_kernels.moe.combine.reference import moe_combine
from nvfp4_kernels.moe.dispatch.call import DispatchCall, Dispatched, Ids, Logits, Source
from nvfp4_kernels.moe.dispatch.reference import moe_dispatch
from nvfp4_kernels.moe.route.reference import moe_route
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.moe.routing import Routing
from nvfp4_kernels.moe.topk.reference import moe_topk
from nvfp4_kernels.tool.product_case import compare_bound, compare_exact
from nvfp4_kernels.tool.task import Figures, Machine

TOKENS = ("moe_quantize", "moe_quantize_per_token", "moe_gather")
ROUTED_TOKENS = ("moe_route_quantize", "moe_route_quantize_per_token", "moe_route_gather")
CHOSEN_TOKENS = tuple(op.replace("moe_", "moe_topk_") for op in ROUTED_TOKENS)
DISPATCHES = (*TOKENS, *ROUTED_TOKENS, *CHOSEN_TOKENS)  # torch ops of moe_dispatch
OPS = ("moe_topk", "moe_route", *DISPATCHES, "moe_combine")
GLOBAL_SCALE = 0.002
RANKS = 4  # ranks with alternating experts
WEIGHT_ERROR = 24 * 2.0**-23  # of an exponential and a sum, relative


@dataclass(frozen=True)
class RoutedCase:
    """Test of an op on a random batch; some slots hold invalid ids or other ranks' ids.

    Attributes:
        op: name of the torch op.
        tokens: tokens of the batch.
        top_k: slots of each token.
        experts: experts of this rank.
        tile_tokens: rows of a token tile.
        k: elements of a token.
        terms: number of NVFP4 terms of quantised tokens.
        weighted: whether routing weights are applied to tokens before the experts or, in
            ``moe_combine``, to the experts' rows.
    """

    op: str
    tokens: int
    top_k: int
    experts: int
    tile_tokens: int
    k: int = 64
    terms: int = 1
    weighted: bool = False

    @property
    def section(self) -> str:
        """Section of the report."""
        return "correctness"

    @property
    def name(self) -> str:
        """Name in the report."""
        words = [self.op, f"{self.tokens}×{self.k}", f"{self.top_k} slots, {self.experts} experts"]
        words.append(f"tiles of {self.tile_tokens}")
        words += [f"{self.terms} terms"] * (self.terms > 1) + ["weighted"] * self.weighted
        return ", ".join(words)

    @property
    def function(self) -> str:
        """Name of the public function."""
        return "moe_dispatch" if self.op in DISPATCHES else self.op

    def run(self, machine: Machine) -> Figures:
        """Run the op and compare the tiles in use with the reference.

        Raises:
            Mismatch: the results differ.
        """
        run = getattr(nvfp4_kernels, self.function)
        moved = [_moved(each, machine.device) for each in self.given()]
        found = [each.cpu() for each in self._made(run(*moved))]
        used, values = int(self.routing.groups[0]), 0.0
        for name, actual, expected in zip(self._parts, found, self._expected(), strict=True):
            of_tokens = dict.fromkeys(("rows", "out", "topk_weights", "topk_ids"), self.tokens)
            most = (of_tokens | {"groups": 1 + used}).get(name, used)
            if name == "topk_weights":
                exact = expected.double()
                compared = compare_bound(actual, exact, WEIGHT_ERROR * exact)
            else:
                compared = compare_exact(_bits(actual[:most]), _bits(expected[:most]))
            values += float(compared["values"])
        return {"values": values, "tiles": float(used)}

    @property
    def routing(self) -> Routing:
        """Routing of the batch, on the CPU."""
        ids, mapped = self._ids()
        if self._chooses:
            ids = moe_topk(self._logits(), None, None, self._router)[1]
        return Routing(*moe_route(ids, mapped, self.experts, self.tile_tokens))

    def given(self) -> list[Any]:
        """Arguments of the op, on the CPU."""
        ids, mapped = self._ids()
        if self.op == "moe_topk":
            return [self._logits(), self._router]
        if self.op == "moe_route":
            return [ids, self.experts, self.tile_tokens, mapped]
        if self.op == "moe_combine":
            tiles = self._random(*self.routing.slots.shape)
            return [tiles, self.routing.rows, self._weights()]
        weights = None if self._chooses else self._weights()
        return [self._random(self.tokens), self._source(), self._output, weights]

    def _source(self) -> Source:
        """Source of the dispatch's routing: a routing, expert ids or router logits."""
        if self.op in TOKENS:
            return self.routing
        (ids, mapped), sizes = self._ids(), (self.experts, self.tile_tokens)
        if self._chooses:
            return Logits(self._logits(), self._router, *sizes, mapped)
        return Ids(ids, *sizes, mapped)

    @property
    def _output(self) -> Output:
        """Format of dispatched tokens."""
        if self.op.endswith("gather"):
            return None
        if self.op.endswith("per_token"):
            return PerToken(self.terms)
        return Static(torch.tensor(GLOBAL_SCALE), self.terms)

    def _expected(self) -> list[Tensor]:
        """Results of the op's reference, in the order of ``_parts``."""
        if self.op == "moe_topk":
            return [*moe_topk(self._logits(), None, None, self._router)]
        if self.op == "moe_route":
            return [*self.routing]
        if self.op == "moe_combine":
            tiles = self._random(*self.routing.slots.shape)
            return [moe_combine(tiles, self.routing.rows, self._weights(), torch.bfloat16)]
        return self._made(moe_dispatch(DispatchCall(*self.given())))

    def _made(self, result: Any) -> list[Tensor]:
        """Tensors that the op makes, in the order of ``_parts``."""
        if not isinstance(result, Dispatched):
            return [result] if isinstance(result, Tensor) else [*result]
        routing = () if self.op in TOKENS else result.routing
        parts = result.topk_weights, *routing, result.data, result.scales, result.row_scale
        return [part for part in parts if part is not None]

    @property
    def _parts(self) -> tuple[str, ...]:
        """Names of the op's results, in order."""
        if self.op in ("moe_combine", "moe_topk"):
            return ("out",) if self.op == "moe_combine" else ("topk_weights", "topk_ids")
        tokens: tuple[str, ...] = () if self.op == "moe_route" else ("data",)
        tokens += ("scales",) * ("quantize" in self.op)
        tokens += ("row_scale",) * self.op.endswith("per_token")
        chosen = ("topk_weights",) * self._chooses
        return tokens if self.op in TOKENS else (*chosen, *Routing._fields, *tokens)

    @property
    def _chooses(self) -> bool:
        """Whether the op takes router logits."""
        return "topk" in self.op

    @property
    def _router(self) -> Router:
        return Router(self.top_k)

    def _logits(self) -> Tensor:
        """Logits of all ranks' experts, distinct within a token."""
        shape = (self.tokens, RANKS * self.experts)
        return torch.rand(shape, generator=_seeded()).argsort(-1) / 16.0

    def _ids(self) -> tuple[Tensor, Tensor]:
        """Expert ids of all slots, and the map from global to local experts."""
        total = RANKS * self.experts
        shape = (self.tokens, self.top_k)
        # One past the last expert, and padding's -1, are no expert's.
        ids = torch.randint(-1, total + 1, shape, generator=_seeded(), dtype=torch.int32)
        mapped = torch.full((total,), -1, dtype=torch.int32)
        mapped[::RANKS] = torch.arange(self.experts, dtype=torch.int32)
        return ids, mapped

    def _random(self, *shape: int) -> Tensor:
        return torch.randn((*shape, self.k), generator=_seeded()).bfloat16()

    def _weights(self) -> Tensor | None:
        shape = (self.tokens, self.top_k)
        return torch.rand(shape, generator=_seeded()) if self.weighted else None


def routed_cases(quick: bool) -> list[RoutedCase]:
    """Cases of every op: few and many tokens, with and without weights, numbers of terms."""
    few = RoutedCase("", 7, 4, 6, 8)
    batches = [
        few,
        RoutedCase("", 40, 4, 6, 32, k=208, weighted=True),
        RoutedCase("", 300, 4, 3, 128, k=208),
    ]
    if not quick:
        batches += [
            RoutedCase("", 1, 8, 32, 8, k=4096, weighted=True),
            RoutedCase("", 513, 8, 128, 64, k=2880),
            RoutedCase("", 8192, 8, 96, 256, k=7168, weighted=True),
        ]
    cases = [replace(batch, op=op) for op in OPS for batch in batches]
    quantized = [op for op in OPS if "quantize" in op]
    return cases + [replace(few, op=op, terms=terms) for op in quantized for terms in (2, 3)]


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return type(value)(*(_moved(part, device) for part in value))
    return value.to(device) if isinstance(value, Tensor) else value


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x
