"""Supply of the bytes that a launch reads: from HBM, or from data still in L2."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tests.emulator.machine.trace import SECTOR, CtaTrace, Event, Touched
from tests.emulator.timing.caches import distinct_bytes, l2_reads
from tests.emulator.timing.errors import TimingError
from tests.emulator.tma.tile import Footprint

_READS = ("copy", "async_copy", "read", "atomic")


@dataclass(frozen=True)
class Operand:
    """Memory that a launch reads.

    Attributes:
        name: name of the operand among the launches of a chain.
        address: address of the first byte in the traced run.
        nbytes: bytes from ``address`` in the traced run.
        total: bytes of the operand in the whole problem.
        streamed: whether the operand evicts nothing from L2, as loads with evict_first do.
    """

    name: str
    address: int
    nbytes: int
    total: float
    streamed: bool = False


class Hits(NamedTuple):
    """Fractions of the bytes read, by source.

    Attributes:
        miss: fraction of the loads' bytes that comes from HBM.
        prefetched: fraction of the loads' bytes that an earlier prefetch has requested.
        prefetch_miss: fraction of the prefetched bytes that comes from HBM.
    """

    miss: float = 0.0
    prefetched: float = 0.0
    prefetch_miss: float = 0.0


class Supply:
    """Fractions of a launch's reads that come from HBM, operand by operand.

    Args:
        ctas: traced CTAs; the launch has ``repeat`` times this number.
        cached: PTX lines of loads that L1 may answer.
        operands: operands that reads are assigned to; empty: reads are not distinguished.
        missing: bytes of each operand that come from HBM; None: the distinct bytes that the traced
            CTAs read, for each repetition. Data that belongs to no operand is in L2.

    Attributes:
        reads: bytes read from L2 without prefetches.
        hbm: bytes from HBM.

    Raises:
        TimingError: operands overlap.
    """

    def __init__(
        self,
        ctas: list[CtaTrace],
        repeat: float,
        cached: frozenset[int],
        operands: tuple[Operand, ...] = (),
        missing: Callable[[Operand], float] | float | None = None,
    ) -> None:
        self._operands = sorted(operands, key=lambda operand: operand.address)
        for one, two in pairwise(self._operands):
            if one.address + one.nbytes > two.address:
                raise TimingError(
                    f"operands: {one.name!r} and {two.name!r} overlap; name each range once"
                )
        self._starts = [operand.address for operand in self._operands]
        self.reads = self.hbm = 0.0
        groups = [self._sorted(cta) for cta in ctas]
        self._hits: dict[int, Hits] = {}
        for number in sorted({key for group in groups for key in group}):
            nbytes: float | None
            if callable(missing):
                nbytes = missing(self._operands[number]) if number >= 0 else 0.0
            else:
                nbytes = missing
            events = [group.get(number, []) for group in groups]
            self._hits[number] = self._share_out(events, repeat, cached, nbytes)

    def operand_of(self, where: Touched) -> int:
        """Number of the operand that a read touches; −1 for memory of no known operand."""
        if not where or not self._starts:
            return -1
        first = where[0]
        address = first.address if isinstance(first, Footprint) else first[0] * SECTOR
        number = bisect_right(self._starts, address + SECTOR - 1) - 1
        if number < 0:
            return -1
        operand = self._operands[number]
        return number if address < operand.address + operand.nbytes else -1

    def hits(self, number: int) -> Hits:
        """Fractions, by source, of an operand's bytes."""
        return self._hits.get(number, Hits())

    def _sorted(self, cta: CtaTrace) -> dict[int, list[Event]]:
        """Reads and prefetches of a CTA by operand."""
        found: dict[int, list[Event]] = {}
        for event in events_of(cta):
            if event.kind == "prefetch" or event.kind in _READS:
                found.setdefault(self.operand_of(event.where), []).append(event)
        return found

    def _share_out(
        self,
        ctas: list[list[Event]],
        repeat: float,
        cached: frozenset[int],
        missing: float | None,
    ) -> Hits:
        """Distribute the bytes from HBM among prefetches and later loads.

        ``ctas``: reads and prefetches of an operand by each CTA; for the rest see ``Supply``.
        """
        fetched = [e for events in ctas for e in events if e.kind == "prefetch"]
        prefetched = repeat * sum(event.amount for event in fetched)
        reads = repeat * sum(l2_reads(events, cached) for events in ctas)
        early = distinct_bytes(event.where for event in fetched)
        read = [e.where for events in ctas for e in events if e.kind in _READS]
        distinct = distinct_bytes([*read, *(event.where for event in fetched)])
        if missing is None:
            missing = distinct * max(1.0, repeat)
        hbm = min(missing, reads + prefetched)
        by_prefetch = min(prefetched, hbm * early / distinct if distinct else 0.0)
        by_load = min(reads, hbm - by_prefetch)
        self.reads += reads
        self.hbm += hbm
        return Hits(
            by_load / reads if reads else 0.0,
            min(1.0, prefetched / reads) if reads else 0.0,
            by_prefetch / prefetched if prefetched else 0.0,
        )


class L2:
    """Operands that L2 holds in whole or in part, with LRU replacement."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._held: OrderedDict[str, float] = OrderedDict()

    def read(self, operand: Operand) -> float:
        """Read an operand; returns the number of its bytes that L2 lacked.

        L2 then holds the operand as far as there is room, unless the operand is streamed.
        """
        missing = max(0.0, operand.total - self._held.get(operand.name, 0.0))
        if not operand.streamed:
            self.write(operand.name, operand.total)
        return missing

    def write(self, name: str, nbytes: float) -> None:
        """Record written bytes as held by L2, as far as they fit."""
        self._held.pop(name, None)
        self._held[name] = min(nbytes, self._capacity)
        excess = sum(self._held.values()) - self._capacity
        for other in list(self._held):
            if excess <= 0:
                break
            gone = min(excess, self._held[other])
            excess -= gone
            self._held[other] -= gone
            if not self._held[other]:
                del self._held[other]


def events_of(cta: CtaTrace) -> Iterator[Event]:
    """Events of all warps of a CTA."""
    return (item for trace in cta.warps for item in trace if isinstance(item, Event))
