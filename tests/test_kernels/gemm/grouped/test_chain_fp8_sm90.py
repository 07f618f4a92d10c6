"""A layer of experts in FP8 on sm_90, from tokens to sums: bit-identical to the references."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_kernels import (
    Dispatched,
    Ids,
    Logits,
    PerTokenFp8,
    Router,
    StaticFp8,
    grouped_silu_mul_gemm,
    moe_combine,
    moe_dispatch,
)
from nvfp4_kernels.activation import SILU
from nvfp4_kernels.formats.folded import decode_folded
from nvfp4_kernels.formats.fp8_rows import from_rows
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.gemm.grouped.reference import grouped_gemm as product_reference
from nvfp4_kernels.moe.combine.reference import moe_combine as combine_reference
from nvfp4_kernels.moe.dispatch.call import DispatchCall, Source
from nvfp4_kernels.moe.dispatch.reference import moe_dispatch as dispatch_reference
from nvfp4_kernels.moe.routing import Routing
from tests import devices
from tests.emulator import EAGER, STANDARD, Schedule
from tests.emulator.findings import MissingDependencyWait
from tests.mutants.kernels import NO_DEPENDENCY_WAIT, compiled_anew
from tests.test_kernels import oracle
from tests.test_kernels.gemm.grouped.cases_fp8 import folded_weights

TOKENS, TOP_K, EXPERTS, TILE_TOKENS = 12, 2, 4, 8
HIDDEN, INNER = 192, 80
BF16 = torch.bfloat16
EVERY_FORMAT = pytest.mark.parametrize("per_token", [False, True], ids=["static", "per token"])


@dataclass(frozen=True)
class Layer:
    """Weights of both products, scales of their inputs, and a batch.

    Tokens and the first product's weights are positive, and gates so large that SiLU is the
    identity; so inputs of the second product lie within a few octaves, and all sums are exact.

    Attributes:
        x: ``(TOKENS, HIDDEN)``.
        logits: ``(TOKENS, EXPERTS)``.
        first, second: data, scales and alpha.
        scale, inner_scales: of tokens, and of each expert's second input.
    """

    x: Tensor
    logits: Tensor
    first: tuple[Tensor, Tensor, Tensor]
    second: tuple[Tensor, Tensor, Tensor]
    scale: Tensor
    inner_scales: Tensor

    def on(self, device: torch.device) -> "Layer":
        """Copy on ``device``."""

        def moved(value: Any) -> Any:
            return tuple(map(moved, value)) if isinstance(value, tuple) else value.to(device)

        return Layer(**{name: moved(value) for name, value in vars(self).items()})

    def source(self, per_token: bool) -> Source:
        """Logits for static scales; ids of two experts of each token for a scale per token."""
        if not per_token:
            return Logits(self.logits, Router(TOP_K), EXPERTS, TILE_TOKENS)
        ids = self.logits.topk(TOP_K).indices.int()
        return Ids(ids, EXPERTS, TILE_TOKENS)

    def output(self, per_token: bool) -> StaticFp8 | PerTokenFp8:
        """Format of the first product's input."""
        return PerTokenFp8() if per_token else StaticFp8(self.scale)


def new_layer() -> Layer:
    rng = np.random.default_rng(0)
    first = oracle.positive_operand(rng, EXPERTS, 2, INNER, HIDDEN)
    second = oracle.grid_operand(rng, EXPERTS, HIDDEN, INNER)
    up, down = (folded_weights(each.data, each.scales) for each in (first, second))
    octaves = torch.ldexp(torch.ones(INNER), torch.arange(INNER) % 4 - 2)
    return Layer(
        x=torch.from_numpy(rng.integers(1, 4, (TOKENS, HIDDEN)) / 4).to(BF16),
        logits=torch.from_numpy(rng.standard_normal((TOKENS, EXPERTS))).float(),
        first=(up.data, up.scales, up.row_scale * octaves),
        second=(down.data, down.scales, down.row_scale / 64),
        scale=torch.tensor(0.25),
        inner_scales=torch.tensor([9e3, 5e3, 3e4, 7e3]),
    )


def run(
    layer: Layer, per_token: bool, *, first_is_late: bool = False
) -> tuple[Dispatched, Tensor, Tensor, Tensor]:
    """Launch the whole layer: dispatch, both products' inputs and results, sums of the tokens.

    ``first_is_late``: take the routing for complete before the launch that made it, a fault.
    """
    from nvfp4_kernels.gemm.sm90 import launch_grouped

    tiles = moe_dispatch(layer.x, layer.source(per_token), layer.output(per_token))
    groups = tiles.routing.groups
    inner = None if per_token else StaticFp8(layer.inner_scales)
    b, b_scales, alpha = layer.first
    if first_is_late:
        operands = tiles.data, None, groups, *layer.first, tiles.row_scale, None, INNER, SILU
        h, _ = launch_grouped.grouped_silu_mul_gemm(
            GroupedGemmCall(*operands, BF16, output=inner, routed_before=True)
        )
    else:
        options: dict[str, Any] = {} if inner is None else {"output": inner}
        h = grouped_silu_mul_gemm(
            tiles.data, None, groups, b, b_scales, alpha, row_scale=tiles.row_scale, n=INNER,
            **options,
        )  # fmt: skip
    a, row_scale = h, None
    if per_token:
        rows = moe_dispatch(h, tiles.routing, PerTokenFp8())
        a, row_scale = rows.data, rows.row_scale
    operands = a, None, groups, *layer.second, row_scale, None, HIDDEN, None
    y, _ = launch_grouped.grouped_gemm(
        GroupedGemmCall(*operands, BF16, routed_before=not per_token)
    )
    return tiles, a, y, moe_combine(y, tiles.routing.rows, tiles.topk_weights)


def expected(
    layer: Layer, per_token: bool, weights: Tensor | None
) -> tuple[Dispatched, Tensor, Tensor, Tensor]:
    """Results of ``run`` by the references; ``weights``: of the router, as the kernel has them."""
    tiles = dispatch_reference(
        DispatchCall(layer.x, layer.source(per_token), layer.output(per_token))
    )
    groups = tiles.routing.groups
    inner = None if per_token else StaticFp8(layer.inner_scales)
    operands = tiles.data, None, groups, *layer.first, tiles.row_scale, None, INNER, SILU
    h, _ = product_reference(GroupedGemmCall(*operands, BF16, output=inner))
    a, row_scale = h, None
    if per_token:
        rows = dispatch_reference(DispatchCall(h, tiles.routing, PerTokenFp8()))
        a, row_scale = rows.data, rows.row_scale
    operands = a, None, groups, *layer.second, row_scale, None, HIDDEN, None
    y, _ = product_reference(GroupedGemmCall(*operands, BF16))
    return tiles, a, y, combine_reference(y, tiles.routing.rows, weights, BF16)


def checks(layer: Layer, per_token: bool, device: torch.device) -> Callable[[], None]:
    """Launch the layer; return a function that checks all results, bit for bit."""
    tiles, a, y, out = run(layer.on(device), per_token)

    def check() -> None:
        weights = None if tiles.topk_weights is None else tiles.topk_weights.cpu()
        right = expected(layer, per_token, weights)
        used = int(right[0].routing.groups[0])
        assert 0 < used < len(a)
        for ours, theirs in ((tiles.data, right[0].data), (a, right[1]), (y, right[2])):
            assert ours.dtype == theirs.dtype
            assert torch.equal(bits(ours)[:used], bits(theirs)[:used])
        assert torch.equal(out.cpu(), right[3])
        assert out.count_nonzero() > 0.9 * out.numel()
        assert right[1][:used].float().unique().numel() > 8

    return check


def bits(x: Tensor) -> Tensor:
    """Bytes of ``x``, on the CPU."""
    return x.cpu().contiguous().view(torch.uint8)


@pytest.mark.arch("sm_90")
@pytest.mark.schedules("eager", "copies late", "tensor late", "all late", "random 1", "random 2")
@EVERY_FORMAT
def test_layer(per_token: bool, op_device: torch.device) -> None:
    if op_device.type == "cuda":
        pytest.skip("sums of a GPU are truncated: results of the second product differ")
    checks(new_layer(), per_token, op_device)()


@EVERY_FORMAT
@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_beside_one_another(schedule: Schedule, per_token: bool) -> None:
    """Every launch starts as early as its predecessors allow."""
    with devices.emulated_ops(schedule, "sm_90") as gpu:
        with gpu.overlapped():
            check = checks(new_layer(), per_token, torch.device("cpu"))
        check()


def test_nothing_is_read_before_the_routing_has_ended() -> None:
    """A layer that skips its waits, or whose first product assumes old routing, is reported."""
    message = r"griddepcontrol\.wait before the read"
    with (
        compiled_anew(),
        devices.emulated_ops(EAGER, "sm_90"),
        pytest.raises(MissingDependencyWait, match=message),
    ):
        run(new_layer(), per_token=False, first_is_late=True)
    with (
        compiled_anew(NO_DEPENDENCY_WAIT),
        devices.emulated_ops(EAGER, "sm_90"),
        pytest.raises(MissingDependencyWait, match=message),
    ):
        run(new_layer(), per_token=False)


def test_is_the_exact_layer() -> None:
    """The references' sums of static scales are those of float64, of the values in memory."""
    layer = new_layer()
    weights = torch.ones(TOKENS, TOP_K)
    tiles, a, y, _ = expected(layer, False, weights)
    assert isinstance(tiles.routing, Routing)
    for tile in range(int(tiles.routing.groups[0])):
        expert = int(tiles.routing.groups[1 + tile])
        h = from_rows(a[tile], INNER).double()
        data, scales, alpha = (each[expert] for each in layer.second)
        w = decode_folded(data, scales, HIDDEN, INNER).double() * alpha.double().unsqueeze(-1)
        assert torch.equal(y[tile], (h @ w.T).to(BF16))
