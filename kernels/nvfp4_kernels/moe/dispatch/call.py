"""Sources, arguments and result of ``moe_dispatch``."""

from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.formats.fp8_rows import padded
from nvfp4_kernels.formats.output import Output, PerToken, PerTokenFp8, Static
from nvfp4_kernels.formats.terms import data_shape, scales_shape
from nvfp4_kernels.moe.route.op import new_routing
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.moe.routing import Routing


class Ids(NamedTuple):
    """Source of a dispatch: ids of each token's selected experts, as for ``moe_route``.

    Attributes:
        topk_ids: int32 ``(M, k)``, k at most 32, the experts of each token. An id that maps to no
            expert of this rank is skipped; a duplicate id counts twice.
        num_experts: number of experts whose weights this rank has, at most 1024.
        tile_tokens: rows per token tile, one of ``routing.TILE_TOKENS``.
        expert_map: int32 ``(E,)``, local index of each global expert, -1 for experts of other
            ranks; None: ids are local.
    """

    topk_ids: Tensor
    num_experts: int
    tile_tokens: int
    expert_map: Tensor | None = None


class Logits(NamedTuple):
    """Source of a dispatch: the router's logits, from which the op selects experts.

    Attributes:
        logits: bfloat16, float16 or float32 ``(M, E)``, as for ``moe_topk``; E is the length of
            ``expert_map``, or ``num_experts``.
        router: routing rule.
        num_experts: number of experts whose weights this rank has, at most 1024.
        tile_tokens: rows per token tile, one of ``routing.TILE_TOKENS``.
        expert_map: as for ``Ids``.
        bias: float32 ``(E,)``, added to scores for selection only; None: no bias.
        padding: bool ``(M,)``, true for rows that are not tokens; None: all rows are tokens.
    """

    logits: Tensor
    router: Router
    num_experts: int
    tile_tokens: int
    expert_map: Tensor | None = None
    bias: Tensor | None = None
    padding: Tensor | None = None

    @property
    def slots(self) -> tuple[int, int]:
        """Shape of the slots, ``(M, k)``."""
        return self.logits.shape[0], self.router.top_k


Source = Routing | Ids | Logits


class DispatchCall(NamedTuple):
    """Arguments of ``moe_dispatch``.

    Attributes:
        x: bfloat16 or float16 ``(M, K)``, K a multiple of 16; or ``(tiles, T, K)``, in the tiles of
            a ``Routing``.
        source: an existing routing, or the tensors that determine one.
        output: format of the result; None: x's dtype.
        topk_weights: float32 ``(M, k)``, factors of the tokens; None: no factors.
    """

    x: Tensor
    source: Source
    output: Output = None
    topk_weights: Tensor | None = None

    @property
    def slots(self) -> tuple[int, int]:
        """Shape of the slots, ``(M, k)``."""
        source = self.source
        if isinstance(source, Logits):
            return source.slots
        rows = source.topk_ids if isinstance(source, Ids) else source.rows
        return rows.shape[0], rows.shape[1]


class Dispatched(NamedTuple):
    """Tokens in the token tiles of ``routing``: ``tiles`` tiles of T rows.

    Attributes:
        data: ``(tiles, T, K)`` of x's dtype; for NVFP4, uint8 ``(tiles, T, K/2)``, with several
            terms ``(tiles, terms, T, K/2)``; for E4M3, float8_e4m3fn ``(tiles, T, ceil(K/64)·64)``
            in the order of ``formats.fp8_rows``, zeros past K.
        scales: float8_e4m3fn, each tile in a blocked layout of its own; with several terms, scales
            of stacked rows (see ``formats.terms``). None unless NVFP4.
        row_scale: float32 ``(tiles, T)``, scale of each row, 1 for padding; None unless
            ``PerToken`` or ``PerTokenFp8``.
        routing: routing of the tokens: the source itself, or the routing computed from the source.
        topk_weights: float32 ``(M, k)``, routing weights of the selected experts; None unless the
            source is ``Logits``.
    """

    data: Tensor
    scales: Tensor | None
    row_scale: Tensor | None
    routing: Routing
    topk_weights: Tensor | None


def empty(call: DispatchCall) -> Dispatched:
    """Allocate the result of a call; a ``Routing`` as source is returned as is."""
    x, source, output, _ = call
    weights = None
    if isinstance(source, Routing):
        routing = source
    else:
        routing = Routing(*new_routing(x, call.slots, source.num_experts, source.tile_tokens))
    if isinstance(source, Logits):
        weights = x.new_empty(call.slots, dtype=torch.float32)
    (tiles, rows), k = routing.slots.shape, x.shape[-1]
    scales = row_scale = None
    if output is None:
        data = x.new_empty((tiles, rows, k))
    elif isinstance(output, Static | PerToken):
        terms = output.terms
        data = x.new_empty(data_shape((tiles,), rows, k, terms), dtype=torch.uint8)
        scales = x.new_empty(scales_shape((tiles,), rows, k, terms), dtype=torch.float8_e4m3fn)
    else:
        data = x.new_empty((tiles, rows, padded(k)), dtype=torch.float8_e4m3fn)
    if isinstance(output, PerToken | PerTokenFp8):
        row_scale = x.new_empty((tiles, rows), dtype=torch.float32)
    return Dispatched(data, scales, row_scale, routing, weights)
