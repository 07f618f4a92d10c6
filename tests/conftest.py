"""``--device``: one body for the emulator and for a GPU.

A test that asks for ``device`` runs once per schedule on the emulator, or once on the GPU. Marked
``arch("sm_100")`` it skips itself, by name, on any other GPU. CuTe DSL binds itself to one runtime
for the life of a process, so ``both`` is two runs, one after the other.
"""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.emulator import STANDARD, Schedule

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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" not in metafunc.fixturenames:
        return
    if metafunc.config.getoption("--device") == "cuda":
        metafunc.parametrize("device", [None], ids=["cuda"], indirect=True)
    else:
        metafunc.parametrize("device", STANDARD, ids=str, indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[object]:
    """A ``tests.devices.KernelDevice``."""
    from tests import devices

    devices.cutlass_or_skip()
    schedule: Schedule | None = request.param
    if schedule is None:
        marker = request.node.get_closest_marker("arch")
        yield devices.cuda_or_skip(marker.args[0] if marker else None)
    else:
        with devices.emulated(schedule) as emulated:
            yield emulated
