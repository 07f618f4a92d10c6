"""Stand-in for the parts of ``torch.cuda`` that the kernel benchmark calls; launches run on CPU."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch


class Stream:
    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


class Graph:
    replays = 0

    def replay(self):
        Graph.replays += 1


class Event:
    """Event that counts as recorded one millisecond after its predecessor."""

    recorded = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.recorded += 1
        self.at = Event.recorded

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return float(end.at - self.at)


@contextmanager
def capturing(_):
    yield


PROPERTIES = SimpleNamespace(
    name="Fake GPU", multi_processor_count=2, L2_cache_size=4096, total_memory=1 << 30
)


def install(monkeypatch, capability):
    """Replace ``torch.cuda`` with the stand-in until the test ends."""
    fakes = {
        "is_available": lambda: True,
        "get_device_capability": lambda device: capability,
        "get_device_properties": lambda device: PROPERTIES,
        "current_stream": Stream,
        "Stream": Stream,
        "stream": capturing,
        "CUDAGraph": Graph,
        "graph": capturing,
        "Event": Event,
        "_sleep": lambda cycles: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
