"""``moe_dispatch``: permute tokens into token tiles, by a routing, expert ids or logits.

A dispatch by ids gives the same bits as a dispatch by the routing that ``moe_route`` makes of the
ids; a dispatch by logits, the same bits as by the ids of ``moe_topk``. On a GPU a small batch takes
one launch, a larger batch two or three: see ``choose``.
"""

from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.dispatch import Mode
from nvfp4_kernels.formats.output import (
    Output,
    PerToken,
    PerTokenFp8,
    Static,
    StaticFp8,
    refuse_output,
)
from nvfp4_kernels.moe.dispatch.arguments import check
from nvfp4_kernels.moe.dispatch.call import DispatchCall, Dispatched, Ids, Logits, Source, empty
from nvfp4_kernels.moe.dispatch.kernels import KERNELS
from nvfp4_kernels.moe.router import checked
from nvfp4_kernels.moe.routing import Routing
from nvfp4_kernels.moe.topk.op import router_of

# Schemas of the sources, and of the last arguments of each source.
_SOURCES = {
    "moe": "Tensor groups, Tensor slots, Tensor rows",
    "moe_route": "Tensor topk_ids, Tensor? expert_map, SymInt num_experts, SymInt tile_tokens",
    "moe_topk_route": "Tensor logits, Tensor? bias, Tensor? padding, Tensor? expert_map, "
    "SymInt num_experts, SymInt tile_tokens",
}
_ROUTER = (
    "SymInt top_k, str scoring, bool renormalize, SymInt groups, SymInt top_groups, float scale"
)
_OUTPUTS = "quantize", "quantize_per_token", "quantize_fp8", "quantize_fp8_per_token", "gather"


def moe_dispatch(
    x: Tensor, source: Source, output: Output = None, topk_weights: Tensor | None = None
) -> Dispatched:
    """Permute tokens into token tiles, quantised or not.

    A quantised row is bit-identical to ``quantize`` of the token, after multiplication if there are
    ``topk_weights``. Padding rows have zero data and scales.

    Args:
        x: bfloat16 or float16 ``(M, K)``, K a multiple of 16; with a ``Routing`` and an ``output``
            also ``(tiles, T, K)``, already in tiles. On a GPU contiguous and, for NVFP4, 32-byte
            aligned, else 16-byte aligned. For E4M3 with a scale per token K is at most 49152.
        source: a ``Routing``; ``Ids``, the experts of each token; or ``Logits``, from which the op
            selects experts.
        output: ``Static(global_scale, terms)`` or ``PerToken(terms)`` for NVFP4 (CPU, sm_100);
            ``StaticFp8(scale)`` or ``PerTokenFp8()`` for E4M3 (CPU, sm_90); None: x's dtype.
        topk_weights: float32 ``(M, k)``: routing weights by which tokens are multiplied first, in
            float32, with products rounded to x's dtype; None: not applied. Must be None with
            ``Logits``, whose weights the op computes, and with rows already in tiles.

    Returns:
        ``Dispatched``: data, scales and row scales of the tiles, the routing, and with ``Logits``
        the routing weights. On a GPU tiles that are not in use are not written.

    Raises:
        InvalidArgument: an unsupported type, dtype, shape, stride or alignment; the message
            names it.
        NoKernelError: no kernel for this device.
    """
    if isinstance(source, Logits):
        logits, router, experts, tile_tokens, expert_map, bias, padding = source
        op: str = "moe_topk_route"
        before: Any = logits, bias, padding, expert_map, experts, tile_tokens
        after: Any = checked(router)
        if topk_weights is not None:
            raise InvalidArgument(
                "topk_weights: given with Logits, whose weights the op computes, must be None; "
                "pass Ids to weigh tokens"
            )
    elif isinstance(source, Ids):
        ids, experts, tile_tokens, expert_map = source
        op, before, after = "moe_route", (ids, expert_map, experts, tile_tokens), ()
    elif isinstance(source, Routing):
        op, before, after = "moe", source, ()
    else:
        raise InvalidArgument(
            f"source: is {type(source).__name__}, must be a Routing, Ids or Logits; make a Routing "
            "with moe_route()"
        )
    weights = () if isinstance(source, Logits) else (topk_weights,)
    suffix, scale, terms = _fields_of(output)
    run = getattr(torch.ops.nvfp4, f"{op}_{suffix}")
    found = run(x, *before, *scale, *weights, *terms, *after)
    parts: list[Any] = [found] if isinstance(found, Tensor) else list(found)
    chosen = parts.pop(0) if isinstance(source, Logits) else None
    if isinstance(source, Routing):
        routing = source
    else:
        routing, parts = Routing(*parts[:3]), parts[3:]
    data = parts.pop(0)
    scales = parts.pop(0) if isinstance(output, Static | PerToken) else None
    row_scale = parts.pop(0) if parts else None
    return Dispatched(data, scales, row_scale, routing, chosen)


def _fields_of(output: Output) -> tuple[str, tuple[Tensor, ...], tuple[int, ...]]:
    """Last part of a custom op's name; scale and number of terms, as far as ``output`` has them."""
    if output is None:
        return "gather", (), ()
    if isinstance(output, Static):
        return "quantize", (output.global_scale,), (output.terms,)
    if isinstance(output, PerToken):
        return "quantize_per_token", (), (output.terms,)
    if isinstance(output, StaticFp8):
        return "quantize_fp8", (output.scale,), ()
    if isinstance(output, PerTokenFp8):
        return "quantize_fp8_per_token", (), ()
    accepted = "Static(global_scale, terms), PerToken(terms), StaticFp8(scale) or PerTokenFp8()"
    raise refuse_output(output, f"None, {accepted}")


def _schema(source: str, output: str) -> str:
    """Schema of the custom op whose arguments are x and the fields of ``source`` and ``output``."""
    routed, chosen = source != "moe", source == "moe_topk_route"
    nvfp4 = output in ("quantize", "quantize_per_token")
    given = ["Tensor x", _SOURCES[source]]
    given += ["Tensor global_scale"] * (output == "quantize")
    given += ["Tensor scale"] * (output == "quantize_fp8")
    given += ["Tensor? topk_weights"] * (not chosen) + ["SymInt terms"] * nvfp4
    given += [_ROUTER] * chosen
    results = 1 + nvfp4 + output.endswith("per_token") + 3 * routed + chosen
    returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    return f"({', '.join(given)}) -> {returned}"


def _packed(source: str, output: str, x: Tensor, *flat: Any) -> DispatchCall:
    """Pack a custom op's arguments, the fields of source and output, into a ``DispatchCall``."""
    count = _SOURCES[source].count(",") + 1
    before, rest = flat[:count], list(flat[count:])
    # torch passes None on for a tensor: an error, not another format.
    scale: Any = rest.pop(0) if output in ("quantize", "quantize_fp8") else None
    weights = None if source == "moe_topk_route" else rest.pop(0)
    to: Output = None
    if output == "quantize":
        to = Static(scale, rest.pop(0))
    elif output == "quantize_per_token":
        to = PerToken(rest.pop(0))
    elif output != "gather":
        to = StaticFp8(scale) if output == "quantize_fp8" else PerTokenFp8()
    if source == "moe":
        return DispatchCall(x, Routing(*before), to, weights)
    if source == "moe_route":
        ids, expert_map, experts, tile_tokens = before
        return DispatchCall(x, Ids(ids, experts, tile_tokens, expert_map), to, weights)
    logits, bias, padding, expert_map, experts, tile_tokens = before
    router = router_of(*rest)
    given = Logits(logits, router, experts, tile_tokens, expert_map, bias, padding)
    return DispatchCall(x, given, to)


def _returned(call: DispatchCall, found: Dispatched) -> Any:
    """Pick the results of a custom op: only tensors that the op creates."""
    data, scales, row_scale, routing, weights = found
    made = () if isinstance(call.source, Routing) else routing
    parts = tuple(part for part in (weights, *made, data, scales, row_scale) if part is not None)
    return parts if len(parts) > 1 else parts[0]


def _run(call: DispatchCall) -> Any:
    check(call)
    kernel = KERNELS.select(call.x.device, _mode_of(call.output)).load()
    return _returned(call, kernel(call))


def _mode_of(output: Output) -> Mode:
    """Arithmetic of the products that read the tiles; ``"float"`` for copies."""
    if output is None:
        return "float"
    return "w4a4" if isinstance(output, Static | PerToken) else "w4a8"


def _define(source: str, output: str) -> None:
    """Define the custom op for ``source`` and ``output``; traced graphs contain the op's name."""

    def run(x: Tensor, *flat: Any) -> Any:
        return _run(_packed(source, output, x, *flat))

    def fake(x: Tensor, *flat: Any) -> Any:
        call = _packed(source, output, x, *flat)
        return _returned(call, empty(call))

    op = torch.library.custom_op(
        f"nvfp4::{source}_{output}", run, mutates_args=(), schema=_schema(source, output)
    )
    op.register_fake(fake)


for _source in _SOURCES:
    for _output in _OUTPUTS:
        _define(_source, _output)
