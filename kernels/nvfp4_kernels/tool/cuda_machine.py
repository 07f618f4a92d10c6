"""Machine for tasks: the first CUDA device."""

import statistics
from collections.abc import Callable, Sequence

import torch

from nvfp4_kernels.tool.timed_graphs import captured, timed

LAUNCHES = 40  # minimum per graph
REPLAYS = 15


class CudaMachine:
    """Machine that times calls in CUDA graphs, with operands cold in L2; see ``Machine``."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def l2_bytes(self) -> int:
        """Size of the device's L2 cache, in bytes."""
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def sms(self) -> int:
        """Number of the device's SMs."""
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Seconds per call: median over replays of a CUDA graph in which ``calls`` take turns.

        Args:
            calls: calls on separate operands, so that operands are cold in L2.
        """
        times = timed({"": captured(calls, LAUNCHES)}, REPLAYS)[""]
        return statistics.median(times) / 1e6  # microseconds
