"""Timings of launches on this machine's GPU, in CUDA graphs that are replayed in turn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Step = Callable[[], object]
WAIT_CYCLES = 400_000  # about 0.2 ms


@dataclass(frozen=True)
class LaunchGraph:
    """Captured CUDA graph, and its number of launches."""

    graph: torch.cuda.CUDAGraph
    launches: int


def captured(steps: Sequence[Step], launches: int) -> LaunchGraph:
    """Capture a CUDA graph of whole rounds through ``steps``.

    Args:
        steps: equal launches on separate operands, so that operands are cold in L2.
        launches: minimum number of launches.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        steps[0]()  # what is compiled or tuned at the first call is not captured
    stream.synchronize()
    turns = -(-launches // len(steps))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in [*steps] * turns:
            step()
    return LaunchGraph(graph, turns * len(steps))


def timed(graphs: Mapping[str, LaunchGraph], rounds: int) -> dict[str, list[float]]:
    """Microseconds per launch in each of ``rounds`` replays, by graph; graphs take turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, captured_graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(WAIT_CYCLES)  # meanwhile the graph is submitted
            start.record()
            captured_graph.graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / captured_graph.launches)
    return times
