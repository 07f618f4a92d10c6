"""Process that runs one example, started by ``run.py``; writes one JSON line per schedule."""

import contextlib
import dataclasses
import io
import json
import re
import runpy
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from tests.emulator.examples.cases import CASES, Case
from tests.emulator.runtime import shim
from tests.emulator.runtime.allocations import WithLiveStorages

# Some examples only print that their check failed.
_FAILED = re.compile(r"\bFAIL(ED)?\b")
_COLOUR = re.compile(r"\x1b\[\d+m")
_ADDRESS = re.compile(r"0x[0-9a-f]{8,}")


class _Counted(WithLiveStorages):
    """Device that counts its launches."""

    launches = 0

    def launch(self, *args: Any, **kwargs: Any) -> object:
        self.launches += 1
        return super().launch(*args, **kwargs)


class _Watched(io.TextIOBase):
    """Standard output that keeps the first text that reports a failure."""

    def __init__(self, to: TextIO) -> None:
        self._to = to
        self.failure = ""

    def write(self, text: str) -> int:
        if _FAILED.search(text) and not self.failure:
            self.failure = text.strip()
        return self._to.write(text)

    def flush(self) -> None:
        self._to.flush()


def _run(case: Case, root: Path) -> str:
    """Run the example's own check; returns "pass" or the reason of the failure."""
    script = root / "examples/python/CuTeDSL" / case.path
    sys.argv = [str(script), *shlex.split(case.arguments)]
    sys.path.insert(0, str(script.parent))
    output = _Watched(sys.stdout)
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            return f"exit {stop.code}"
    except Exception as error:
        traceback.print_exc()
        message = _COLOUR.sub("", str(error)).strip().partition("\n")[0]
        return f"{type(error).__name__}: {_ADDRESS.sub('0x...', message)}"
    finally:
        sys.path.pop(0)
    return f"it prints: {output.failure}" if output.failure else "pass"


def main() -> None:
    name, root, schedules, record, results = sys.argv[1:6]
    case = next(case for case in CASES if case.name == name)

    import numpy as np

    from tests.emulator import B200, H200, Gpu
    from tests.emulator.examples.recorder import Recorder
    from tests.emulator.findings import (
        BarrierMisuse,
        DataRace,
        ExitedPeer,
        LaneReach,
        MissingRegisterFence,
        RegisterBudget,
        TensorMemoryMisuse,
        UnfinishedStore,
        UninitialisedRead,
        UnstartedPeer,
        UnwaitedLoad,
    )
    from tests.emulator.machine.schedule import STANDARD

    # Behaviour of NVIDIA's own examples that violates the PTX ISA: noted, not refused.
    tolerated = (
        BarrierMisuse,
        DataRace,
        ExitedPeer,
        LaneReach,
        MissingRegisterFence,
        RegisterBudget,
        TensorMemoryMisuse,
        UnfinishedStore,
        UninitialisedRead,
        UnstartedPeer,
        UnwaitedLoad,
    )
    device: Any
    runs: list[tuple[str, Any]]
    found: dict[str, Any] = {}
    limits = dataclasses.replace(H200 if case.arch == "sm_90a" else B200, sms=case.sms)
    if record:
        runs = [("recorded", Recorder(Path(record), name))]
    else:
        wanted = schedules.split(",")
        chosen = [s for s in STANDARD if schedules == "all" or s.name in wanted]
        gpus = {s.name: Gpu(limits, schedule=s, tolerated=tolerated) for s in chosen}
        runs = [(schedule, _Counted(gpu)) for schedule, gpu in gpus.items()]
        found = {schedule: gpu.findings for schedule, gpu in gpus.items()}
    runtime = shim.install(runs[0][1], case.arch)

    import torch

    from tests.emulator.examples import fake_cuda, fake_torch

    torch.set_num_threads(1)
    fake_torch.install(case.sms, case.arch)
    fake_cuda.install(runtime, case.sms)
    for label, device in runs:
        runtime.device = device
        torch.manual_seed(0)
        np.random.seed(0)
        started = time.monotonic()
        result = _run(case, Path(root))
        seconds = time.monotonic() - started
        if record:
            result = f"{len(device.launches)} launches; {result}"
        elif result == "pass" and not device.launches:
            result = "no kernel was launched"
        for finding in found.get(label, ()):
            print(f"{label}: {type(finding).__name__}: {finding}")
        outcome = {
            "schedule": label,
            "result": result,
            "seconds": seconds,
            "findings": sorted({type(finding).__name__ for finding in found.get(label, ())}),
        }
        with open(results, "a") as lines:
            print(json.dumps(outcome), file=lines)


if __name__ == "__main__":
    main()
