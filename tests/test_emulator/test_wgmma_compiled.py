"""A kernel with wgmma as CuTe DSL compiles it, bit for bit."""

import pytest

from tests.devices import KernelDevice


@pytest.mark.arch("sm_90")
@pytest.mark.parametrize("n", [16, 32, 256])
@pytest.mark.parametrize("k", [64, 448])
def test_every_bit(n: int, k: int, device: KernelDevice) -> None:
    from tests.test_emulator.kernels.warpgroup_gemm import right

    assert right(n, k, device)
