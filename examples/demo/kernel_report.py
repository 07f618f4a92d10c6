"""Lines of the server's log that report the kernel of every layer."""

import re
from dataclasses import dataclass

LINE = re.compile(r"nvfp4-tc: (?P<layer>\S+) ×(?P<count>\d+): (?P<kernel>.+)$")


@dataclass(frozen=True)
class LayerKernel:
    """A group of ``count`` layers, and the kernel of the group."""

    layer: str
    count: int
    kernel: str


def parse_kernel_report(log: str) -> list[LayerKernel]:
    """Read the report out of a server's log.

    Raises:
        ValueError: if the log has no line of the report.
    """
    found = [LINE.search(line.rstrip()) for line in log.splitlines()]
    report = [LayerKernel(m["layer"], int(m["count"]), m["kernel"]) for m in found if m]
    if not report:
        raise ValueError(
            "log: no line `nvfp4-tc: <layer> ×<count>: <kernel>`, so it is unknown which kernels "
            "ran; check that the plugin is installed in the server's environment"
        )
    return report
