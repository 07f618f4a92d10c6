"""Process that runs one of NVIDIA's examples and reports the time of each launch.

``__main__`` starts the process. Arguments: the script, the script's arguments, SMs to emulate,
clusters of the grid to extrapolate to (0: the traced clusters), bytes from HBM (-1 for the
default), part of the kernels' names and a file for the timeline.
"""

import dataclasses
import json
import runpy
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.emulator.runtime import shim

if TYPE_CHECKING:
    from tests.emulator.machine.launch import Launch

MARK = "@timing "


def main() -> None:
    script, arguments, sms, clusters, footprint, only, timeline = sys.argv[1:8]

    from tests.emulator.findings import EmulatorError
    from tests.emulator.machine.limits import B200
    from tests.emulator.runtime.allocations import WithLiveStorages
    from tests.emulator.timing import model
    from tests.emulator.timing.device import TimedGpu
    from tests.emulator.timing.perfetto import write
    from tests.emulator.timing.report import report, show

    gpu = TimedGpu(dataclasses.replace(B200, sms=int(sms)), tolerated=(EmulatorError,))

    def finished(launch: "Launch") -> None:
        name = launch.program.kernel.name
        if only not in name:
            return
        given = float(footprint)
        timing = model(
            launch, clusters=int(clusters) or None, footprint=given if given >= 0 else None
        )
        show(report(timing))
        found = {
            "kernel": name,
            "cycles": timing.cycles,
            "us": timing.microseconds,
            "flops": timing.flops,
            "tensor": timing.tensor_efficiency,
            "clusters": timing.clusters,
        }
        print(MARK + json.dumps(found), flush=True)
        if timeline:
            write(timing, Path(timeline))

    gpu.finished = finished
    runtime = shim.install(WithLiveStorages(gpu))
    import torch

    from tests.emulator.examples import fake_cuda, fake_torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fake_torch.install(int(sms))
    fake_cuda.install(runtime, int(sms))
    sys.argv = [script, *shlex.split(arguments)]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
