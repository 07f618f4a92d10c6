"""Launches of ``moe_dispatch`` on sm_90 and sm_100, for every source and output."""

from typing import Any

from nvfp4_kernels.checks import check_layout
from nvfp4_kernels.device.row_vectors.fp8 import Fp8Rows
from nvfp4_kernels.device.rowwise.operands import check_aligned
from nvfp4_kernels.device.rowwise.output import QuantizedRows
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.formats.output import PerToken, PerTokenFp8, Static, StaticFp8
from nvfp4_kernels.formats.terms import TermLayout
from nvfp4_kernels.moe.dispatch.call import DispatchCall, Dispatched, Ids, Logits, empty
from nvfp4_kernels.moe.dispatch.choose import (
    choose_fp8_rows,
    choose_gather,
    choose_rows,
    ctas_of_ids,
    ctas_of_logits,
    ctas_of_tiles,
    fuse_ids,
    fuse_logits,
    items_of_tile,
)
from nvfp4_kernels.moe.dispatch.gather import CopiedRows, Fp8TokenRows, GatheredRows, RowVectors
from nvfp4_kernels.moe.dispatch.ids import CtaRoute, IdsArguments
from nvfp4_kernels.moe.dispatch.kernel import MoeDispatch
from nvfp4_kernels.moe.dispatch.logits import LogitsArguments, TopkRoute
from nvfp4_kernels.moe.dispatch.quantize import MoeRows, QuantizedItems
from nvfp4_kernels.moe.dispatch.tokens import (
    DispatchArguments,
    GivenTiles,
    TilesArguments,
    Tokens,
)
from nvfp4_kernels.moe.route.kernel import batch_of, check_batch, check_map, moe_route, sizes_of
from nvfp4_kernels.moe.route.sort import Batch, RoutingOut
from nvfp4_kernels.moe.routing import Routing
from nvfp4_kernels.moe.topk.choice import RouterLogits
from nvfp4_kernels.moe.topk.kernel import check_logits, choice_of, moe_topk
from nvfp4_kernels.runtime.compile import launch

Rows = GatheredRows | Fp8TokenRows | MoeRows


def moe_dispatch(call: DispatchCall) -> Dispatched:
    """See ``nvfp4_kernels.moe.dispatch.op.moe_dispatch``.

    Raises:
        InvalidArgument: a tensor is misaligned or not contiguous, or the expert map is too long.
    """
    source, output = call.source, call.output
    sms = device_facts(call.x.device).sms
    rows = _rows_of(call, sms)
    threads = rows.tile.threads
    if isinstance(source, Logits):
        sizes, teams = (source.num_experts, source.tile_tokens), isinstance(output, Static)
        cluster = fuse_logits(source.slots, *sizes, threads, teams)
        if cluster is not None:
            topk = choice_of(source.logits, source.bias, source.router)
            in_cta = TopkRoute(topk, cluster, sizes_of(source.expert_map, *sizes))
            return _from_logits(call, source, in_cta, rows, sms)
        weights, ids = moe_topk(source.logits, source.bias, source.padding, source.router)
        chosen = call._replace(source=Ids(ids, *sizes, source.expert_map))
        return moe_dispatch(chosen)._replace(topk_weights=weights)
    if isinstance(source, Ids):
        ids, experts, tile_tokens, expert_map = source
        sort = fuse_ids(ids.numel(), experts, tile_tokens, threads)
        if sort is not None:
            route = CtaRoute(sort, sizes_of(expert_map, experts, tile_tokens))
            return _from_ids(call, source, route, rows, sms)
        routing = Routing(*moe_route(ids, expert_map, experts, tile_tokens))
        return moe_dispatch(call._replace(source=routing))
    return _from_tiles(call, source, rows, sms)


def _from_tiles(call: DispatchCall, routing: Routing, rows: Rows, sms: int) -> Dispatched:
    """Launch for existing tiles, unless the result has no elements."""
    for name, part in routing._asdict().items():
        check_layout(f"routing.{name}", part)
    found = empty(call)
    if found.data.numel():
        columns = rows.columns if isinstance(rows, MoeRows) else 1
        items = len(routing.slots) * _items_of_tile(call, rows, routing.tile_tokens)
        ctas = -(-ctas_of_tiles(items, rows.tile.threads, sms) // columns)
        source = GivenTiles(routing.tile_tokens)
        _launch(call, source, rows, TilesArguments(routing.groups), found, ctas)
    return found


def _from_ids(call: DispatchCall, ids: Ids, route: CtaRoute, rows: Rows, sms: int) -> Dispatched:
    """Launch for ids, even without slots or elements, as the number of tiles must be written."""
    check_batch(ids.topk_ids, ids.expert_map)
    found = empty(call)
    items = len(found.routing.slots) * _items_of_tile(call, rows, ids.tile_tokens)
    batch = batch_of(ids.topk_ids, ids.expert_map, ids.num_experts)
    ctas = 1 + ctas_of_ids(items, sms)
    arguments = IdsArguments(batch, RoutingOut(*found.routing))
    _launch(call, route, rows, arguments, found, ctas)
    return found


def _from_logits(
    call: DispatchCall, source: Logits, route: TopkRoute, rows: Rows, sms: int
) -> Dispatched:
    """Launch for logits, even without tokens, as the number of tiles must be written."""
    logits, router, experts, tile_tokens, expert_map, bias, padding = source
    check_logits(logits, bias, padding)
    check_map(expert_map)
    found = empty(call)
    items = len(found.routing.slots) * _items_of_tile(call, rows, tile_tokens)
    total = experts if expert_map is None else len(expert_map)
    arguments = LogitsArguments(
        RouterLogits(logits, bias, padding, len(logits)),
        Batch(None, expert_map, len(logits) * router.top_k, total),
        RoutingOut(*found.routing),
        found.topk_weights,
    )
    ctas = ctas_of_logits(items, route.tile.cluster, sms)
    _launch(call, route, rows, arguments, found, ctas)
    return found


def _launch(
    call: DispatchCall, source: Any, rows: Rows, arguments: Any, found: Dispatched, ctas: int
) -> None:
    x, _, output, weights = call
    check_layout("x", x)
    check_layout("topk_weights", weights)
    (tiles, tile_tokens), k = found.routing.slots.shape, x.shape[-1]
    out: Any
    if isinstance(rows, GatheredRows):
        out = CopiedRows(found.data, k)
    elif isinstance(rows, Fp8TokenRows):
        scale = output.scale if isinstance(output, StaticFp8) else found.row_scale
        out = Fp8Rows(found.data, scale, tiles * tile_tokens, k)
    else:
        check_aligned("x", x)
        scale = output.global_scale if isinstance(output, Static) else found.row_scale
        out = QuantizedRows(found.data, found.scales, scale, tile_tokens, k, tiles)
        if not isinstance(source, GivenTiles):
            out = QuantizedItems(out, items_of_tile(rows.tile, tile_tokens, k))
    slots = found.routing.slots if isinstance(source, GivenTiles) else None
    tokens = Tokens(x, slots, weights)
    launch(MoeDispatch(source, rows), DispatchArguments(arguments, tokens, out, ctas))


def _items_of_tile(call: DispatchCall, rows: Rows, tile_tokens: int) -> int:
    """Number of work items per token tile."""
    k = call.x.shape[-1]
    if isinstance(rows, RowVectors):
        return rows.items_of_tile(tile_tokens, k)
    return items_of_tile(rows.tile, tile_tokens, k)


def _rows_of(call: DispatchCall, sms: int) -> Rows:
    """Choose the layout of rows, as if every slot of the batch were a row in use."""
    x, source, output, weights = call
    k, (tokens, top_k), weighted = x.shape[-1], call.slots, weights is not None
    dtype, of_token = dtype_name(x.dtype), top_k if x.ndim == 2 else 0
    if output is None:
        return GatheredRows(dtype, choose_gather(k), of_token, weighted)
    per_token = isinstance(output, PerToken | PerTokenFp8)
    sizes = tokens * top_k, k, x.element_size(), per_token, sms
    if isinstance(output, StaticFp8 | PerTokenFp8):
        return Fp8TokenRows(dtype, choose_fp8_rows(*sizes), of_token, weighted, per_token)
    tile_tokens = source.tile_tokens
    return MoeRows(
        dtype=dtype,
        per_token=per_token,
        tile=choose_rows(*sizes),
        tile_tokens=tile_tokens,
        k=k,
        top_k=of_token,
        weighted=weighted,
        terms=TermLayout.of(output.terms, tile_tokens),
    )
