"""Stages of a mixture of two experts, for both architectures: eight tokens of 256 elements.

| kind | value |
|---|---|
| choices | int32 (8, 4), experts of each token: 32 ids that map to two experts in turn |
| routing | a ``Routing`` |
| tokens | bfloat16 (8, 256), a layer's input or result |
| tiles, wide tiles | a routing, and the operand of the first or the second product |
| scaled tiles | the same as tiles, with a row scale |
| tile rows | a routing, and 16-bit rows in tiles: the first product's result, not quantised |
| FP8 tiles, wide FP8 tiles | a routing, E4M3 rows in tiles, and their row scale or None |
| scaled FP8 tiles | the same as FP8 tiles, with a row scale |
| results | a routing, and the second product's result |
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module

import torch
from torch import Tensor

import nvfp4_kernels as ops
from nvfp4_kernels.activation import SILU
from nvfp4_kernels.formats.folded import to_folded
from nvfp4_kernels.formats.fragments import to_fragments
from nvfp4_kernels.formats.nvfp4 import quantize_weight
from nvfp4_kernels.formats.output import Fp8Output, Output
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.moe.routing import Routing
from tests.test_kernels.chains.stage import Stage, Value

TOKENS, HIDDEN, TOP_K = 8, 256, 4
EXPERTS, ALL_EXPERTS, TILE_TOKENS = 2, 32, 8


def new_tokens() -> Tensor:
    return torch.randn(TOKENS, HIDDEN).bfloat16()


def new_choices() -> Tensor:
    return torch.randint(0, ALL_EXPERTS, (TOKENS, TOP_K), dtype=torch.int32)


def expert_map() -> Tensor:
    return torch.arange(ALL_EXPERTS, dtype=torch.int32) % EXPERTS


def new_routing() -> Routing:
    """Routing by the reference."""
    from nvfp4_kernels.moe.route.reference import moe_route

    return Routing(*moe_route(new_choices(), expert_map(), EXPERTS, TILE_TOKENS))


def new_tiles() -> Value:
    """NVFP4 tokens in tiles, by the reference."""
    from nvfp4_kernels.moe.dispatch.call import DispatchCall
    from nvfp4_kernels.moe.dispatch.reference import moe_dispatch

    return parts(moe_dispatch(DispatchCall(new_tokens(), new_routing(), ops.Static(scale()))))


def new_scaled_tiles() -> Value:
    routing, *operand = new_tiles()
    return (routing, *operand, torch.rand(routing.slots.shape))


def new_tile_rows() -> Value:
    routing = new_routing()
    return routing, torch.randn(*routing.slots.shape, HIDDEN).bfloat16()


def new_fp8_tiles(is_scaled: bool) -> Value:
    """E4M3 tokens in tiles, by the reference; ``is_scaled``: with a scale per token."""
    from nvfp4_kernels.moe.dispatch.call import DispatchCall
    from nvfp4_kernels.moe.dispatch.reference import moe_dispatch

    return fp8_parts(moe_dispatch(DispatchCall(new_tokens(), new_routing(), fp8(is_scaled))))


NVFP4_GIVEN: dict[str, Callable[[], Value]] = {
    "tiles": new_tiles, "wide tiles": new_tiles, "scaled tiles": new_scaled_tiles
}  # fmt: skip
FLOAT_GIVEN: dict[str, Callable[[], Value]] = {"tiles": new_tile_rows, "wide tiles": new_tile_rows}
FP8_GIVEN: dict[str, Callable[[], Value]] = {
    "FP8 tiles": partial(new_fp8_tiles, False),
    "wide FP8 tiles": partial(new_fp8_tiles, False),
    "scaled FP8 tiles": partial(new_fp8_tiles, True),
}
GIVEN: dict[str, Callable[[], Value]] = {
    "choices": new_choices,
    "routing": new_routing,
    "tokens": new_tokens,
    "tile rows": new_tile_rows,
    "results": new_tile_rows,
}


def scale() -> Tensor:
    """Global scale, float32 ()."""
    return torch.tensor(0.01)


def fp8(is_scaled: bool) -> Fp8Output:
    """E4M3 with a scale per token, or a static scale."""
    return ops.PerTokenFp8() if is_scaled else ops.StaticFp8(scale())


@cache
def weight(gated: bool, fragments: bool) -> tuple[Tensor, Tensor]:
    """Data and scales of the weights of all experts, which are equal."""
    one = quantize_weight(torch.randn(HIDDEN, HIDDEN))
    blocked = one.to_blocked()
    parts = to_fragments(one.data, one.scales) if fragments else (blocked.data, blocked.scales)
    batch = (EXPERTS, 2) if gated else (EXPERTS,)
    data, scales = (part.expand(*batch, *part.shape).contiguous() for part in parts)
    return data, scales


@cache
def folded(gated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Data, scales and alpha of the folded weights of all experts, which are equal."""
    one = quantize_weight(torch.randn(HIDDEN, HIDDEN))
    made = to_folded(one.data, one.scales)
    batch = (EXPERTS, 2) if gated else (EXPERTS,)
    parts = made.data, made.scales, made.row_scale
    data, scales, alpha = (part.expand(*batch, *part.shape).contiguous() for part in parts)
    return data, scales, alpha


def routed(choices: Tensor) -> tuple[Value, ...]:
    """Result of ``moe_route``."""
    return (ops.moe_route(choices, EXPERTS, TILE_TOKENS, expert_map()),)


def parts(found: ops.Dispatched) -> Value:
    """A routing, and the operand of a product."""
    tiles = found.data, found.scales, found.row_scale
    return (found.routing, *(part for part in tiles if part is not None))


def fp8_parts(found: ops.Dispatched) -> Value:
    """A routing, and the E4M3 operand of a product."""
    return found.routing, found.data, found.row_scale


def entered(output: Output, routing: Routing | None, tokens: Tensor | None) -> tuple[Value, ...]:
    """Tokens permuted into the tiles of a routing; missing inputs are made here."""
    tokens = new_tokens() if tokens is None else tokens
    return (_parts_of(output)(ops.moe_dispatch(tokens, routing or new_routing(), output)),)


def routed_and_entered(
    output: Output, choices: Tensor | None, tokens: Tensor | None
) -> tuple[Value, ...]:
    """Tokens permuted into tiles by a dispatch that also routes."""
    tokens = new_tokens() if tokens is None else tokens
    choices = new_choices() if choices is None else choices
    source = ops.Ids(choices, EXPERTS, TILE_TOKENS, expert_map())
    return (_parts_of(output)(ops.moe_dispatch(tokens, source, output)),)


def chosen_and_entered(output: Output, tokens: Tensor) -> tuple[Value, ...]:
    """Tokens permuted into tiles by a dispatch that also chooses experts; logits are random."""
    logits, router = torch.randn(TOKENS, ALL_EXPERTS), ops.Router(TOP_K)
    source = ops.Logits(logits, router, EXPERTS, TILE_TOKENS, expert_map())
    return (_parts_of(output)(ops.moe_dispatch(tokens, source, output)),)


def _parts_of(output: Output) -> Callable[[ops.Dispatched], Value]:
    return fp8_parts if isinstance(output, Fp8Output) else parts


def requantized(output: Output, rows: Value) -> tuple[Value, ...]:
    """Rows in tiles, quantised with a scale per row."""
    return entered(output, *rows)


def product(
    arch: str, gated: bool, quantized: bool, early: bool, tiles: Value
) -> tuple[Value, ...]:
    """Launch a grouped product; ``early``: routing ended before the preceding launch.

    No op has an argument for that: the plugin calls the kernel table's function.
    """
    routing, *operand = tiles
    a, a_scales, row_scale = (*operand, None, None)[:3]
    launch = import_module(f"nvfp4_kernels.gemm.{arch.replace('_', '')}.launch_grouped")
    output = ops.Static(torch.full((EXPERTS,), 0.01)) if quantized else None
    activation = SILU if gated else None
    run = launch.grouped_silu_mul_gemm if gated else launch.grouped_gemm
    alpha = torch.ones(EXPERTS, 2) if gated else torch.ones(EXPERTS)
    call = GroupedGemmCall(
        a, a_scales, routing.groups, *weight(gated, arch == "sm_90"), alpha, row_scale, None,
        HIDDEN, activation, torch.bfloat16, output=output, routed_before=early,
    )  # fmt: skip
    found = run(call)
    return ((routing, *(part for part in found if part is not None)),)


def fp8_product(gated: bool, quantized: bool, early: bool, tiles: Value) -> tuple[Value, ...]:
    """Launch a grouped product of E4M3 rows on sm_90; ``early``: as for ``product``."""
    from nvfp4_kernels.gemm.sm90.launch_grouped import grouped_gemm

    routing, a, row_scale = tiles
    output = ops.StaticFp8(torch.full((EXPERTS,), 0.01)) if quantized else None
    call = GroupedGemmCall(
        a, None, routing.groups, *folded(gated), row_scale, None, HIDDEN, SILU if gated else None,
        torch.bfloat16, output=output, routed_before=early,
    )  # fmt: skip
    out, _ = grouped_gemm(call, gated=gated)
    return ((routing, out, *([None] if quantized else [])),)


def combined(results: Value) -> tuple[Value, ...]:
    """Result of ``moe_combine``."""
    routing, y = results
    return (ops.moe_combine(y, routing.rows),)


def _entering(op: str, output: Output, gives: str = "tiles") -> list[Stage]:
    """Stages of an op that permutes tokens into tiles: after routing, and after another layer.

    Later stages read the same memory after either stage, so they follow the first only.
    """
    is_routing = op.startswith("moe_route")
    run, takes = (routed_and_entered, "choices") if is_routing else (entered, "routing")
    source = "moe_dispatch of ids" if is_routing else "moe_dispatch of tiles"
    return [
        Stage(f"{op}, {takes}", source, takes, (gives,), lambda x: run(output, x, None)),
        Stage(f"{op}, tokens", source, "tokens", (), lambda x: run(output, None, x)),
    ]


def _choosing(op: str, output: Output, gives: str = "tiles") -> Stage:
    """Stage of an op that chooses experts and permutes tokens, after the preceding layer."""
    run = partial(chosen_and_entered, output)
    return Stage(f"{op}, tokens", "moe_dispatch of logits", "tokens", (gives,), run)


def _products(arch: str) -> list[Stage]:
    """Stages of both products of a layer."""
    first = partial(product, arch, True, arch == "sm_100", False)
    early = partial(product, arch, False, False, True)
    source = "grouped_gemm"
    return [
        Stage("grouped_silu_mul_gemm", source, "tiles", ("wide tiles",), first),
        Stage("grouped_gemm, early", source, "wide tiles", ("results",), early),
    ]


def _fp8_products() -> list[Stage]:
    """Stages of both products of a layer in FP8, with static scales and with scales per token."""
    source = "grouped_gemm"
    return [
        Stage(
            "grouped_silu_mul_gemm, FP8", source, "FP8 tiles", ("wide FP8 tiles",),
            partial(fp8_product, True, True, False),
        ),
        Stage(
            "grouped_gemm, FP8, early", source, "wide FP8 tiles", ("results",),
            partial(fp8_product, False, False, True),
        ),
        Stage(
            "grouped_silu_mul_gemm, FP8, row scale", source, "scaled FP8 tiles", ("tile rows",),
            partial(fp8_product, True, False, False),
        ),
        Stage(
            "grouped_gemm, FP8, early, row scale", source, "scaled FP8 tiles", ("results",),
            partial(fp8_product, False, False, True),
        ),
    ]  # fmt: skip


_ROUTE = Stage("moe_route", "moe_route", "choices", ("routing",), routed)
_COMBINE = Stage("moe_combine", "moe_combine", "results", ("tokens",), combined)
SM100 = [
    _ROUTE,
    *_entering("moe_quantize", ops.Static(scale())),
    *_entering("moe_quantize_per_token", ops.PerToken(), "scaled tiles"),
    *_entering("moe_route_quantize", ops.Static(scale())),
    _choosing("moe_topk_route_quantize", ops.Static(scale())),
    *_products("sm_100"),
    Stage(
        "grouped_silu_mul_gemm, 16 bits", "grouped_gemm", "scaled tiles", ("tile rows",),
        partial(product, "sm_100", True, False, False),
    ),
    Stage(
        "grouped_gemm, early, row scale", "grouped_gemm", "scaled tiles", (),
        partial(product, "sm_100", False, False, True),
    ),
    Stage(
        "moe_quantize, in tiles", "moe_dispatch of tiles", "tile rows", ("scaled tiles",),
        partial(requantized, ops.PerToken()),
    ),
    _COMBINE,
]  # fmt: skip
SM90 = [
    _ROUTE,
    *_entering("moe_gather", None),
    *_entering("moe_route_gather", None),
    _choosing("moe_topk_route_gather", None),
    *_products("sm_90"),
    *_entering("moe_quantize_fp8", fp8(False), "FP8 tiles"),
    *_entering("moe_quantize_fp8_per_token", fp8(True), "scaled FP8 tiles"),
    *_entering("moe_route_quantize_fp8", fp8(False), "FP8 tiles"),
    _choosing("moe_topk_route_quantize_fp8", fp8(False), "FP8 tiles"),
    *_fp8_products(),
    Stage(
        "moe_quantize_fp8, in tiles", "moe_dispatch of tiles", "tile rows", ("scaled FP8 tiles",),
        partial(requantized, fp8(True)),
    ),
    _COMBINE,
]  # fmt: skip
