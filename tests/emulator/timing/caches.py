"""Cache model: the timing of L1, and the distinct bytes that a launch reads from HBM."""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tests.emulator.machine.trace import SECTOR, Event, Touched
from tests.emulator.tma.tile import Footprint

Runs = Iterable[tuple[int, int]]


class L1:
    """An SM's cache of global memory, by sector, with LRU replacement."""

    def __init__(self, nbytes: float) -> None:
        self._capacity = int(nbytes) // SECTOR
        self._ready: OrderedDict[int, float] = OrderedDict()

    def look(self, runs: Runs, space: int = 0) -> tuple[list[int], float]:
        """Missing sectors, and the cycle at which the sectors present or pending have arrived.

        Args:
            runs: runs of consecutive sectors, each as (first sector, number of sectors).
            space: number of an address space, one for each replay of the same traced cluster.
        """
        missing, until = [], 0.0
        known = self._ready
        for first, count in runs:
            first += space << 48
            for sector in range(first, first + count):
                ready = known.get(sector)
                if ready is None:
                    missing.append(sector)
                else:
                    known.move_to_end(sector)
                    until = max(until, ready)
        return missing, until

    def fill(self, sectors: list[int], ready: float) -> None:
        for sector in sectors:
            self._ready[sector] = ready
        while len(self._ready) > self._capacity:
            self._ready.popitem(last=False)


def distinct_bytes(touched: Iterable[Touched]) -> int:
    """Bytes of the sectors that reads touch, each counted once."""
    runs: set[tuple[int, int]] = set()
    regions: set[Footprint] = set()
    for where in touched:
        for item in where:
            if isinstance(item, Footprint):
                regions.add(item)
            else:
                runs.add(item)
    parts = [np.array(sorted(runs), np.int64).reshape(-1, 2)]
    parts[0][:, 1] += parts[0][:, 0]
    parts += [_rows(region) for region in regions]
    spans = np.concatenate(parts)
    if not spans.size:
        return 0
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reached = np.maximum.accumulate(spans[:, 1])
    start = np.maximum(spans[1:, 0], reached[:-1])
    total = spans[0, 1] - spans[0, 0] + np.maximum(spans[1:, 1] - start, 0).sum()
    return int(total) * SECTOR


def _rows(region: Footprint) -> npt.NDArray[np.int64]:
    """First sector of each row of a region, and the sector after its last."""
    places = np.array([region.address], np.int64)
    for size, stride in zip(region.shape[:-1], region.strides[:-1], strict=True):
        places = (places[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return np.stack([places // SECTOR, -(-(places + region.shape[-1]) // SECTOR)], 1)


def _reads_of(event: Event) -> int:
    """Bytes that an event reads from L2, without prefetches."""
    detail = event.detail
    if event.kind == "copy":
        assert isinstance(detail, tuple)
        return event.amount if detail[0] == "global" else 0
    if event.kind == "async_copy":
        assert isinstance(detail, tuple)
        return int(detail[1]) * SECTOR
    if event.kind in ("read", "atomic"):
        assert isinstance(detail, tuple)
        return int(detail[2]) * SECTOR if detail[0] == "global" else 0
    return 0


def l2_reads(events: Iterable[Event], cached: frozenset[int]) -> int:
    """Bytes that one CTA reads from L2 if L1 caches the loads at the PTX lines ``cached``."""
    kept: list[Touched] = []
    total = 0
    for event in events:
        if event.kind == "read" and event.line in cached:
            kept.append(event.where)
        else:
            total += _reads_of(event)
    return total + distinct_bytes(kept)
