"""Pytest options; ``--device`` runs one test body on the emulator or on a GPU.

A test with the fixture ``device`` or ``op_device`` runs on the emulator once per schedule (all
schedules, or those of its ``schedules`` marker), or once on the GPU. The emulator models sm_100, or
the architecture of an ``arch("sm_90")`` marker; on a GPU of another architecture, a marked test is
skipped. CuTe DSL binds itself to one runtime per process, so ``--device both`` starts two runs, one
after the other.

``--cpu``: simulate an x86-64 CPU with fewer features, in a process started for that CPU.

``--quick``: only short tests, which need no emulator, no engine and no other process.

``--lane test``: leave out thorough tests whose sources have not changed since all tests passed
(``tests/lanes.py``); ``--record`` records the sources after a run of all tests.

``--source-lines``: the emulator's findings name lines of the kernel's source, which takes longer.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from tests import cpus, devices, heap, lanes, vllm_kernels
from tests.devices import KernelDevice
from tests.emulator import STANDARD, Schedule

pytest_plugins = ["tests.watchdog"]
heap.collect_seldom()  # importing the tests makes many objects already

DEVICES = ("emulator", "cuda", "both")
SLOW_FOLDERS = {"test_emulator", "test_examples", "test_package", "test_suite"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=DEVICES,
        default="emulator",
        help="where tests with a device run their kernels (default: %(default)s)",
    )
    parser.addoption(
        "--cpu",
        choices=("native", *cpus.CPUS),
        default="native",
        help="which CPU every process takes this one for (default: %(default)s)",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out whatever needs the emulator, an engine or another process",
    )
    parser.addoption(
        "--lane",
        choices=lanes.LANES,
        default="all",
        help="which tests run: all, or without thorough ones that nothing changed (default: all)",
    )
    parser.addoption(
        "--record",
        action="store_true",
        help="record in tests/passed.json the sources of the files of tests that have passed",
    )
    parser.addoption(
        "--source-lines",
        action="store_true",
        help="compile kernels so that the emulator's findings name their own lines, not the PTX's",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    cpu = cpus.CPUS.get(config.getoption("--cpu"))
    if cpu and not cpus.is_simulated(cpu):
        cpus.check(cpu)
        return _run_again(config, cpus.environment(cpu))
    if config.getoption("--device") != "both":
        return None
    codes = []
    for device in ("emulator", "cuda"):
        print(f"\n=== --device {device}", flush=True)
        # The last --device option wins.
        codes.append(_run_again(config, os.environ, "--device", device))
    return max(codes)


def _run_again(config: pytest.Config, environment: Mapping[str, str], *options: str) -> int:
    given = [str(a) for a in config.invocation_params.args]
    command = [sys.executable, "-m", "pytest", *given, *options]
    return subprocess.run(command, env=environment, check=False).returncode


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record"):
        _check_whole(config)
    devices.on_cuda = config.getoption("--device") == "cuda"
    devices.is_quick = config.getoption("--quick")
    devices.source_lines = config.getoption("--source-lines")
    if not hasattr(config, "workerinput"):  # xdist's workers inherit it
        folder = tempfile.TemporaryDirectory(prefix="kernels-")
        os.environ[devices.RUN_KERNELS] = folder.name
        config.add_cleanup(folder.cleanup)


_RUN_TO_THE_END = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED
_failed: set[str] = set()  # files with a test that has failed


def _check_whole(config: pytest.Config) -> None:
    """Refuse ``--record`` in combination with options that leave tests out."""
    partial = [name for name in ("--quick", "-k", "-m") if config.getoption(name)]
    partial += ["--maxfail"] if config.getoption("maxfail") else []
    partial += ["--lane test"] if config.getoption("--lane") == "test" else []
    partial += [] if config.args_source is pytest.Config.ArgsSource.TESTPATHS else ["paths"]
    if partial and not hasattr(config, "workerinput"):
        raise pytest.UsageError(
            f"--record: given with {', '.join(partial)}, must be a run of all tests; leave it out"
        )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    is_controller = not hasattr(session.config, "workerinput")
    if session.config.getoption("--record") and is_controller and exitstatus in _RUN_TO_THE_END:
        root = session.config.rootpath
        failed = {root / name for name in _failed}
        lanes.record(set((root / "tests").rglob("test_*.py")) - failed)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid.partition("::")[0])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of test files that a quick run leaves out."""
    slow = collection_path.parent == config.rootpath / "tests" and (
        collection_path.name in SLOW_FOLDERS
    )
    return True if slow and config.getoption("--quick") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with engines first, then others with vLLM; drop the tests that a lane leaves out.

    Thousands of emulated kernels leave a large heap, in which an engine takes up to three times as
    long to start, and the engine config of each file takes ten seconds.
    """
    if config.getoption("--quick"):
        left_out = [item for item in items if not _is_quick(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _is_quick(item)]
    if config.getoption("--lane") == "test":
        left_out = [i for i in items if lanes.is_thorough(i) and lanes.is_unchanged(i.path)]
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    engines = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in engines, "test_plugin" not in item.path.parts))


def _is_quick(item: pytest.Item) -> bool:
    """Whether a test runs in this process alone; test bodies that emulate skip themselves."""
    assert isinstance(item, pytest.Function)
    marked = any(item.get_closest_marker(name) for name in ("slow", "processes"))
    return not (marked or lanes.is_thorough(item))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("vllm_ops"):
        vllm_kernels.skip_without(*marker.args)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device_schedule" not in metafunc.fixturenames:
        return
    if metafunc.config.getoption("--device") == "cuda":
        metafunc.parametrize("device_schedule", [None], ids=["cuda"])
        return
    marker = metafunc.definition.get_closest_marker("schedules")
    schedules = [s for s in STANDARD if marker is None or s.name in marker.args]
    metafunc.parametrize("device_schedule", schedules, ids=str)


@pytest.fixture(scope="session", autouse=True)
def every_call_checked() -> Iterator[None]:
    """Suspend the launch cache, as tests replace kernel choosers; a test may enable the cache."""
    from nvfp4_kernels.runtime import launch_cache

    with launch_cache.suspended():
        yield


@pytest.fixture(scope="module", autouse=True)
def own_variables() -> Iterator[None]:
    """Restore vLLM's environment variables after each test file: vLLM itself sets some of them.

    Files run in any order, and their child processes inherit the environment.
    """
    kept = vllm_variables()
    yield
    for name in vllm_variables().keys() - kept.keys():
        del os.environ[name]
    os.environ |= kept


def vllm_variables() -> dict[str, str]:
    """Environment variables that vLLM reads."""
    return {name: text for name, text in os.environ.items() if name.startswith("VLLM_")}


@pytest.fixture
def device(
    request: pytest.FixtureRequest, device_schedule: Schedule | None
) -> Iterator[KernelDevice]:
    """Device on which the test's own kernel launches run."""
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
    """Device for the arguments of an op that makes the op run its kernel, not the reference."""
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
