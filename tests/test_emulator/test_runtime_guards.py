"""Guards behind the shared arrays of kernels that CuTe DSL compiles."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.devices import Emulated, emulated, other_kernels
from tests.emulator import B200, EAGER
from tests.emulator.findings import ArrayOverrun, LaunchError
from tests.emulator.machine.cta import SHARED_BASE
from tests.emulator.ptx.shared_arrays import MAX_GUARD, end_of
from tests.emulator.runtime import shim


@contextmanager
def compiling(guards: bool = True) -> Iterator[Emulated]:
    """Context with an emulator for the kernels that are compiled inside."""
    from nvfp4_kernels.runtime import compile as compiler

    with other_kernels(), emulated(EAGER) as device:
        runtime = shim.installed()
        assert runtime is not None
        runtime.guard_shared_arrays(guards)
        compiler.compiled.cache_clear()
        yield device


def _launch(device: Emulated, array: int = 0, beyond: int = 0) -> list[int]:
    from nvfp4_kernels.runtime.compile import launch
    from tests.test_emulator.kernels.placing import ARRAYS, Placing

    out = device.output("out", torch.empty(len(ARRAYS), dtype=torch.int32))
    launch(Placing(array, beyond), out)
    return out.tolist()


def test_arrays_lie_where_the_comments_say() -> None:
    with compiling() as device:
        from tests.test_emulator.kernels.placing import ARRAYS, UNTOUCHED

        addresses = _launch(device)
        done = device.gpu.launches[-1]
        told = done.program.kernel.shared_arrays
        assert [(a.nbytes, a.align) for a in told] == [
            (count * dtype.width // 8, alignment) for dtype, count, alignment in ARRAYS
        ]
        for number, (address, array) in enumerate(zip(addresses, told, strict=True)):
            assert array.guard >= 16
            if number != UNTOUCHED:
                assert address == SHARED_BASE + array.offset
        assert done.dynamic_shared == done.memory_bytes == end_of(told)
        assert done.shared_bytes == 6292  # the last array is at 6288


@pytest.mark.parametrize("array", [0, 1, 3, 4, 5])
def test_an_element_too_far_is_reported(array: int) -> None:
    with compiling() as device:
        _launch(device, array)
        for beyond in (1, 2):
            match = rf"write of shared memory .*bytes after the end of array {array} of"
            with pytest.raises(ArrayOverrun, match=match):
                _launch(device, array, beyond)


def test_without_guards_a_neighbour_is_overwritten() -> None:
    with compiling(guards=False) as device:
        _launch(device, 3, 1)
        assert not device.gpu.launches[-1].program.kernel.shared_arrays


def test_guards_take_no_more_of_the_device() -> None:
    from nvfp4_kernels.runtime.compile import launch

    with compiling() as device:
        from tests.test_emulator.kernels.placing import Large

        out = device.output("out", torch.empty(1, dtype=torch.int32))
        launch(Large(B200.shared), out)
        done = device.gpu.launches[-1]
        assert done.shared_bytes == B200.shared
        assert done.dynamic_shared == B200.shared + MAX_GUARD
        with pytest.raises(LaunchError, match=f"{B200.shared + 16} bytes"):
            launch(
                Large(B200.shared + 16), device.output("more", torch.empty(1, dtype=torch.int32))
            )


@pytest.mark.parametrize(
    ("nbytes", "reserved", "message"),
    [
        (
            1024,
            True,
            r"must be\s+bytes\s+in\s+partition",
        ),
        (260 * 1024, False, "267264 bytes with guards, must be at most 261120"),
    ],
)
def test_what_cannot_be_guarded(nbytes: int, reserved: bool, message: str) -> None:
    from nvfp4_kernels.runtime.compile import launch

    with compiling() as device:
        from tests.test_emulator.kernels.placing import Large

        out = device.output("out", torch.empty(1, dtype=torch.int32))
        with pytest.raises(Exception, match=message):
            launch(Large(nbytes, reserved), out)
