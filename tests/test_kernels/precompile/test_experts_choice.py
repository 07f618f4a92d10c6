"""Precompiled kernels of experts: kernels launched from logits, and the padded width."""

from typing import Any

import pytest
import torch

from nvfp4_kernels import Logits, Router, Static, moe_dispatch
from nvfp4_kernels.activation import SILU
from nvfp4_kernels.devices import FAMILIES, SM_COUNTS
from nvfp4_kernels.gemm.grouped.tile_tokens import ExpertSizes, tile_tokens
from nvfp4_kernels.precompile.experts_layer import (
    GROUPED_K_STEPS,
    Choice,
    Experts,
    padded_width,
)
from nvfp4_kernels.precompile.experts_rows import row_specs
from nvfp4_kernels.runtime import compile as compiler
from tests import devices
from tests.emulator import EAGER

H, E, TOP_K = 64, 8, 2
ROUTER = Router(TOP_K, "sigmoid", groups=4, top_groups=2, scale=1.5)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("tokens", [1, 5, 40, 1100])
def test_kernels_from_logits(arch: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    launched: list[Any] = []

    def compiled(kernel: Any, target: str) -> Any:
        launched.append(kernel)
        return lambda *words: None

    inputs: Any = "16-bit" if arch == "sm_90" else "static"
    choice = Choice(ROUTER, "float32", True)
    sizes = ExpertSizes(H, 32, E, E)
    experts = Experts(sizes, TOP_K, SILU, "bfloat16", inputs, choice=choice)
    rows = tile_tokens(arch, tokens, TOP_K, sizes, SM_COUNTS[arch])
    specs = [spec for _, spec in row_specs(experts, tokens, rows, SM_COUNTS[arch])]
    x, logits, bias = torch.zeros(tokens, H).bfloat16(), torch.zeros(tokens, E), torch.zeros(E)
    with devices.emulated_ops(EAGER, arch):
        monkeypatch.setattr(compiler, "compiled", compiled)
        output = None if arch == "sm_90" else Static(torch.tensor(1.0))
        moe_dispatch(x, Logits(logits, ROUTER, E, rows, bias=bias), output)
    made = [spec.kernel() for spec in specs if spec.op != "moe_combine"]
    assert launched == made
    assert len(made) == (3 if tokens > 1024 else 1)


@pytest.mark.parametrize(("family", "width"), [("cpu", 144), ("sm_90", 144), ("sm_100", 160)])
def test_the_width_that_a_family_pads_to(family: str, width: int) -> None:
    """I = 144 is a multiple of 16 but not of 32."""
    assert padded_width(144, family) == width


def test_every_family_has_a_granularity_of_k() -> None:
    assert GROUPED_K_STEPS.keys() == {"cpu", *FAMILIES.values()}
