"""Whole kernels of our own, compiled by CuTe DSL, against the float reference, bit for bit."""

import functools
import time

import pytest
import torch

from tests.devices import KernelDevice
from tests.test_emulator.kernels.cases import SHAPES
from tests.test_emulator.kernels.config import GemmConfig, Shape


@functools.cache
def _problem(shape: Shape) -> "Problem":  # noqa: F821
    from tests.test_emulator.kernels.problem import Problem

    return Problem(shape)


@pytest.mark.arch("sm_100")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_bit(shape: Shape, device: KernelDevice) -> None:
    problem = _problem(shape)
    started = time.process_time()
    assert problem.run(device)
    seconds = time.process_time() - started
    print(f"{shape}: {seconds:.3f} s of one core")


@pytest.mark.arch("sm_100")
def test_a_tile_is_fast_once_compiled(device: KernelDevice) -> None:
    problem = _problem(Shape(128, 256, 256, GemmConfig(tile_n=256)))
    problem.run(device)
    started = time.process_time()
    problem.run(device)
    assert time.process_time() - started < 0.5


def test_any_device(device: KernelDevice) -> None:
    """Bulk copies, mbarriers and proxy fences run on any device, as sm_90 has these too."""
    from nvfp4_kernels.runtime.compile import launch
    from tests.test_emulator.kernels.doubling import CHUNK, CTAS, SLOTS, Doubling

    chunks = CTAS * 3 * SLOTS + 1
    x = torch.arange(CHUNK * chunks, dtype=torch.float32)
    y = device.output("y", x)
    launch(Doubling(), device.put("x", x), y, chunks)
    assert torch.equal(y.cpu(), 2 * x)


def test_what_the_kernel_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="tile_n: 192, accepted are 128 and 256"):
        GemmConfig(tile_n=192)
    with pytest.raises(ValueError, match="stages: 9, accepted are 2 to 5 for these tiles"):
        GemmConfig(stages=9)
    with pytest.raises(ValueError, match="K must be a multiple of 32"):
        Shape(128, 128, 48, GemmConfig())
    with pytest.raises(ValueError, match="rows of C of 16 bytes"):
        Shape(128, 130, 64, GemmConfig())
