"""Experts with biases, on one rank or several: launched kernels are those compiled ahead."""

from typing import Any

import pytest
import torch

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.devices import SM_COUNTS, standing_in
from nvfp4_kernels.formats.fragments import fragment_shapes
from nvfp4_kernels.formats.nvfp4 import blocked_shape
from nvfp4_kernels.formats.output import Static
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.gemm.grouped.tile_tokens import ExpertSizes, tile_tokens
from nvfp4_kernels.moe.routing import max_tiles
from nvfp4_kernels.precompile.experts import experts_kernels
from nvfp4_kernels.precompile.experts_layer import Experts
from tests import devices
from tests.test_kernels.few_sms import use_sms

E, TOP_K, TOKENS = 4, 2, 5
SIZES = {
    "all experts": ExpertSizes(96, 64, E, E),
    "a rank of eight": ExpertSizes(1024, 6400, E, 8 * E),  # its tiles are not those of all slots
}
OAI = Activation("swigluoai_uninterleave", 7.0, 1.702, 1.0)
U8, F8, BF16 = torch.uint8, torch.float8_e4m3fn, torch.bfloat16


def products(family: str, sizes: ExpertSizes, tiles: int, rows: int) -> list[GroupedGemmCall]:
    """Arguments of both products of a layer, as the kernels take them."""
    found = []
    h, width = sizes.h, sizes.i
    for n, k, matrices in ((width, h, (E, 2)), (h, width, (E,))):
        is_first, alpha = len(matrices) == 2, torch.ones(matrices)
        groups = torch.zeros(1 + tiles, dtype=torch.int32)
        activation = OAI if is_first else None
        if family == "sm_90":
            a: list[Any] = [torch.zeros(tiles, rows, k).to(BF16), None]
            b = [torch.zeros(*matrices, *shape, dtype=U8) for shape in fragment_shapes(n, k)]
            output = None
        else:
            a = [torch.zeros(tiles, rows, k // 2, dtype=U8)]
            a.append(torch.zeros(tiles, *blocked_shape(rows, k // 16)).to(F8))
            b = [torch.zeros(*matrices, n, k // 2, dtype=U8)]
            b.append(torch.zeros(*matrices, *blocked_shape(n, k // 16)).to(F8))
            output = Static(torch.ones(E)) if is_first else None
        bias = torch.zeros(*matrices, n).to(BF16)
        found.append(
            GroupedGemmCall(
                *a, groups, *b, alpha, None, bias, n, activation, BF16, output=output,
                routed_before=not is_first, global_experts=sizes.total,
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("family", ["sm_90", "sm_100"])
def test_products_with_a_bias(family: str, ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    from nvfp4_kernels.gemm.sm90 import launch_grouped as sm90
    from nvfp4_kernels.gemm.sm100 import launch_grouped as sm100

    module: Any = {"sm_90": sm90, "sm_100": sm100}[family]
    launched = []
    sms = SM_COUNTS[family]
    monkeypatch.setattr(module, "launch", lambda kernel, arguments: launched.append(kernel))
    use_sms(module, sms, monkeypatch)
    inputs: Any = "16-bit" if family == "sm_90" else "static"
    sizes = SIZES[ranks]
    experts = Experts(sizes, TOP_K, OAI, "bfloat16", inputs, bias=True)
    specs = experts_kernels(experts, family, max_tokens=TOKENS, sms=sms)
    rows = tile_tokens(family, TOKENS, TOP_K, sizes, sms)
    with standing_in("cpu", family):
        first, second = products(family, sizes, max_tiles(TOKENS * TOP_K, E, rows), rows)
        module.grouped_silu_mul_gemm(first)
        module.grouped_gemm(second)
    assert len(launched) == 2
    assert all(kernel.output.bias == "bfloat16" for kernel in launched)
    assert set(launched) <= {spec.kernel() for spec in specs if spec.op == "grouped_gemm"}
