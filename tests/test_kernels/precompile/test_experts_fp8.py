"""Experts in FP8 on sm_90: every launched kernel of a layer is among those compiled ahead."""

from typing import Any, get_args

import pytest
import torch

from nvfp4_kernels import Ids, Logits, PerTokenFp8, Router, StaticFp8, moe_combine, moe_dispatch
from nvfp4_kernels.activation import SILU
from nvfp4_kernels.devices import SM_COUNTS
from nvfp4_kernels.formats.folded import folded_shapes
from nvfp4_kernels.formats.fp8_rows import padded
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.gemm.grouped.tile_tokens import ExpertSizes, tile_tokens
from nvfp4_kernels.moe.dispatch.call import Source
from nvfp4_kernels.precompile.experts import experts_kernels
from nvfp4_kernels.precompile.experts_layer import Choice, Experts, Inputs
from nvfp4_kernels.runtime import compile as compiler
from tests import devices
from tests.emulator import EAGER

HIDDEN, INNER, E, TOP_K = 96, 80, 4, 2
SIZES = ExpertSizes(HIDDEN, INNER, E, E)
SMS = SM_COUNTS["sm_90"]


def layer(tokens: int, per_token: bool, chosen: bool, bias: bool) -> None:
    """Launch every kernel of a layer of experts."""
    from nvfp4_kernels.gemm.sm90 import launch_grouped

    rows = tile_tokens("sm_90", tokens, TOP_K, SIZES, SMS)
    source: Source = Ids(torch.zeros(tokens, TOP_K, dtype=torch.int32), E, rows)
    if chosen:
        source = Logits(torch.zeros(tokens, E), Router(TOP_K), E, rows)
    static = StaticFp8(torch.tensor(1.0))
    x = torch.zeros(tokens, HIDDEN).bfloat16()
    found = moe_dispatch(x, source, PerTokenFp8() if per_token else static)
    a, row_scale, routing = found.data, found.row_scale, found.routing
    for n, k, matrices in ((INNER, HIDDEN, (E, 2)), (HIDDEN, INNER, (E,))):
        is_first = len(matrices) == 2
        data, scales = folded_shapes(n, padded(k))
        weight = torch.zeros(*matrices, *data, dtype=torch.uint8)
        factors = torch.zeros(*matrices, *scales, dtype=torch.int32), torch.ones(*matrices, n)
        biases = torch.zeros(*matrices, n).bfloat16() if bias else None
        call = GroupedGemmCall(
            a, None, routing.groups, weight, *factors, row_scale, biases, n,
            SILU if is_first else None, torch.bfloat16,
            output=StaticFp8(torch.ones(E)) if is_first and not per_token else None,
            routed_before=not is_first and not per_token,
        )  # fmt: skip
        run = launch_grouped.grouped_silu_mul_gemm if is_first else launch_grouped.grouped_gemm
        a, _ = run(call)
        if is_first and per_token:
            again = moe_dispatch(a, routing, PerTokenFp8())
            a, row_scale = again.data, again.row_scale
    moe_combine(a, routing.rows, torch.ones(tokens, TOP_K))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("chosen", [False, True], ids=["ids", "logits"])
@pytest.mark.parametrize("inputs", ["fp8-static", "fp8-per-token"])
@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
def test_launched_kernels(
    tokens: int, inputs: Inputs, chosen: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.cutlass_or_skip()
    launched: list[Any] = []

    def compiled(kernel: Any, target: str) -> Any:
        launched.append(kernel)
        return lambda *words: None

    choice = Choice(Router(TOP_K), "float32", False) if chosen else None
    experts = Experts(SIZES, TOP_K, SILU, "bfloat16", inputs, bias=bias, choice=choice)
    specs = experts_kernels(experts, "sm_90", max_tokens=tokens, sms=SMS)
    with devices.emulated_ops(EAGER, "sm_90"):
        monkeypatch.setattr(compiler, "compiled", compiled)
        layer(tokens, inputs == "fp8-per-token", chosen, bias)
    assert set(launched) <= {spec.kernel() for spec in specs}
    assert len(launched) >= (5 if inputs == "fp8-per-token" else 4)


def test_inputs_have_one_meaning() -> None:
    """Each format of the inputs is E4M3 or not, with a scale per token or not."""
    kinds = {
        inputs: (experts.is_fp8, experts.is_per_token)
        for inputs in get_args(Inputs)
        for experts in [Experts(SIZES, TOP_K, SILU, "bfloat16", inputs)]
    }
    assert kinds == {
        "static": (False, False), "per-token": (False, True), "16-bit": (False, False),
        "fp8-static": (True, False), "fp8-per-token": (True, True),
    }  # fmt: skip
