"""Timing launches on this machine's GPU: in CUDA graphs that replay in turn."""

from collections.abc import Callable, Mapping, Sequence

import torch

Step = Callable[[], object]


def captured(steps: Sequence[Step], launches: int) -> torch.cuda.CUDAGraph:
    """A graph of so many launches: ``steps`` one after the other, again and again."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        steps[0]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(launches):
            steps[n % len(steps)]()
    return graph


def timed(
    graphs: Mapping[str, torch.cuda.CUDAGraph], launches: int, rounds: int
) -> dict[str, list[float]]:
    """Microseconds of a launch in each graph's replays, which alternate."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / launches)
    return times
