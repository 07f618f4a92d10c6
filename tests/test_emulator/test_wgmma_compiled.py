"""A kernel with wgmma as CuTe DSL compiles it, bit for bit."""

import pytest
import torch

from tests.devices import KernelDevice


@pytest.mark.arch("sm_90")
@pytest.mark.parametrize("n", [16, 32, 256])
@pytest.mark.parametrize("k", [64, 448])
def test_every_bit(n: int, k: int, device: KernelDevice) -> None:
    from nvfp4_kernels.compile import launch
    from tests.test_emulator.kernels.warpgroup_gemm import WarpgroupGemm

    torch.manual_seed(0)
    a, b = (torch.randint(-4, 5, (rows, k)).to(torch.bfloat16) for rows in (256, n))
    d = device.output("d", torch.zeros(256, n))
    launch(WarpgroupGemm(n), device.put("a", a), device.put("b", b), d, 256, k)
    assert torch.equal(d.cpu(), a.float() @ b.float().T)
