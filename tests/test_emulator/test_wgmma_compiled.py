"""Kernels of sm_90 compiled by CuTe DSL in the same process as kernels of sm_100."""

import pytest
import torch

from tests.devices import KernelDevice, emulated
from tests.emulator import EAGER


@pytest.mark.arch("sm_90")
@pytest.mark.parametrize("n", [16, 32, 256])
@pytest.mark.parametrize("k", [64, 448])
def test_every_bit(n: int, k: int, device: KernelDevice) -> None:
    from tests.test_emulator.kernels.warpgroup_gemm import right

    assert right(n, k, device)


@pytest.mark.parametrize("order", [("sm_90", "sm_100", "sm_90"), ("sm_100", "sm_90", "sm_100")])
def test_a_kernel_is_compiled_for_each_device(order: tuple[str, ...]) -> None:
    from nvfp4_kernels.runtime.compile import launch
    from tests.test_emulator.kernels.doubling import CHUNK, Doubling

    for arch in order:
        with emulated(EAGER, arch) as device:
            x = torch.arange(CHUNK, dtype=torch.float32)
            y = device.output("y", x)
            launch(Doubling(), device.put("x", x), y, 1)
            assert torch.equal(y, 2 * x)
            assert device.gpu.launches[-1].program.module.target == f"{arch}a"


@pytest.mark.arch("sm_90")
@pytest.mark.schedules("eager")
def test_ops_take_its_kernels(op_device: torch.device) -> None:
    from nvfp4_kernels.devices import device_arch
    from nvfp4_kernels.runtime.compile import arch

    assert device_arch(op_device) == "sm_90"
    assert arch() == "sm_90a"
