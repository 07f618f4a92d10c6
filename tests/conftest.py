"""``--device``: one body for the emulator and for a GPU.

A test that asks for ``device`` or ``op_device`` runs on the emulator once per schedule (those of
its ``schedules`` marker, or all), or once on the GPU. The emulator is of sm_100, or of what an
``arch("sm_90")`` marker says; on any other GPU a marked test skips itself, by name. CuTe DSL binds
itself to one runtime for the life of a process, so ``both`` is two runs, one after the other.
"""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests import devices
from tests.devices import KernelDevice
from tests.emulator import STANDARD, Schedule

pytest_plugins = ["tests.watchdog"]

DEVICES = ("emulator", "cuda", "both")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=DEVICES,
        default="emulator",
        help="where tests with a device run their kernels (default: %(default)s)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if config.getoption("--device") != "both":
        return None
    given = [str(a) for a in config.invocation_params.args]
    codes = []
    for device in ("emulator", "cuda"):
        # The last --device counts.
        command = [sys.executable, "-m", "pytest", *given, "--device", device]
        print(f"\n=== --device {device}", flush=True)
        codes.append(subprocess.run(command, check=False).returncode)
    return max(codes)


def pytest_configure(config: pytest.Config) -> None:
    devices.on_cuda = config.getoption("--device") == "cuda"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with engines first.

    Later, in the large heap that thousands of emulated kernels leave, one takes up to three times
    as long to start.
    """
    engines = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in engines)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device_schedule" not in metafunc.fixturenames:
        return
    if metafunc.config.getoption("--device") == "cuda":
        metafunc.parametrize("device_schedule", [None], ids=["cuda"])
        return
    marker = metafunc.definition.get_closest_marker("schedules")
    schedules = [s for s in STANDARD if marker is None or s.name in marker.args]
    metafunc.parametrize("device_schedule", schedules, ids=str)


@pytest.fixture
def device(
    request: pytest.FixtureRequest, device_schedule: Schedule | None
) -> Iterator[KernelDevice]:
    """Where a kernel that the test launches itself runs."""
    devices.cutlass_or_skip()
    if device_schedule is None:
        yield devices.cuda_or_skip(_arch(request))
    else:
        with devices.emulated(device_schedule, _arch(request) or "sm_100") as emulated:
            yield emulated


@pytest.fixture
def op_device(
    request: pytest.FixtureRequest, device_schedule: Schedule | None
) -> Iterator[torch.device]:
    """Where to put the arguments of an op for its kernel to run, not its reference."""
    devices.cutlass_or_skip()
    if device_schedule is None:
        devices.cuda_or_skip(_arch(request))
        yield torch.device("cuda")
    else:
        with devices.emulated_ops(device_schedule, _arch(request) or "sm_100"):
            yield torch.device("cpu")


def _arch(request: pytest.FixtureRequest) -> str | None:
    marker = request.node.get_closest_marker("arch")
    return marker.args[0] if marker else None
