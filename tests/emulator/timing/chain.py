"""Model of a chain of launches, each of which may start before its predecessor has ended."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.emulator.timing.chip import Chip
from tests.emulator.timing.engine import Engine
from tests.emulator.timing.errors import TimingError
from tests.emulator.timing.grid import Grid, Ordered
from tests.emulator.timing.opaque import OpaqueGrid, OpaqueLink
from tests.emulator.timing.parameters import B200_TIMING, Parameters
from tests.emulator.timing.prepared import Prepared
from tests.emulator.timing.stream import Stream
from tests.emulator.timing.supply import L2, Operand, Supply
from tests.emulator.timing.timeline import Timeline

if TYPE_CHECKING:
    from tests.emulator.machine.launch import Launch

_ATTRIBUTE = "programmatic_stream_serialization"
_BUDGET = 400_000  # trace items up to which all GPCs are simulated


@dataclass(frozen=True)
class Link:
    """One launch of a chain.

    Attributes:
        launch: launch from ``Gpu.launch(..., traced=True)``. A launch with
            ``programmatic_stream_serialization`` overlaps its predecessor.
        clusters: number of clusters of the grid; the traced clusters repeat to fill the grid.
            None: the traced clusters alone.
        operands: operands that the launch reads, identified by address. HBM supplies the part of an
            operand that L2 does not hold; data outside the operands is in L2. Without operands, all
            distinct bytes read come from HBM.
        writes: bytes written, by operand name: L2 holds them afterwards.
        registers: registers per thread, as ptxas reports (-v); 0 for unknown.
        repeats: see ``Prepared``.
        label: name of the launch in times and timelines; empty for the kernel's name.
    """

    launch: "Launch"
    clusters: int | None = None
    operands: tuple[Operand, ...] = ()
    writes: dict[str, float] = field(default_factory=dict)
    registers: int = 0
    repeats: tuple[int, ...] = ()
    label: str = ""


@dataclass(frozen=True)
class LinkTime:
    """Times of one launch within a chain.

    Attributes:
        kernel: entry name, or the launch's label.
        opened: µs from the chain's start until the launch's clusters may start.
        begun: µs from the chain's start until the launch may read its predecessor's results.
        ended: µs from the chain's start until the last cluster and its writes are done.
        hbm_bytes: bytes read from HBM.
    """

    kernel: str
    opened: float
    begun: float
    ended: float
    hbm_bytes: float


@dataclass(frozen=True)
class ChainTiming:
    """Modelled time of a chain.

    Attributes:
        links: times of the launches, in order.
        busy: fraction of the chain's time that each unit works, averaged over the simulated SMs.
        gpcs: number of SMs in each simulated GPC; these GPCs represent the whole chip.
        timeline: timeline of the first SM.
    """

    links: list[LinkTime]
    busy: dict[str, float]
    gpcs: tuple[int, ...]
    timeline: Timeline

    @property
    def microseconds(self) -> float:
        """Microseconds until the last launch has ended."""
        return self.links[-1].ended

    def period(self, count: int) -> float:
        """Microseconds of the last ``count`` launches, from the end of the launch before them."""
        if not 0 < count < len(self.links):
            raise ValueError(f"count: {count}, accepted 1 to {len(self.links) - 1}; add launches")
        return self.links[-1].ended - self.links[-1 - count].ended


def chain(
    links: Sequence[Link | OpaqueLink],
    parameters: Parameters = B200_TIMING,
    *,
    gpcs: int | None = None,
) -> ChainTiming:
    """Model the time of launches in stream order.

    Args:
        links: one or more launches.
        parameters: parameters of the chip.
        gpcs: number of GPCs to simulate, with their share of the clusters and of the bandwidth; by
            default all GPCs if the simulation is cheap, else one.

    Raises:
        TimingError: there are no launches, a launch was not traced, or the chain never ends.
    """
    if not links:
        raise TimingError("links: none, accepted one launch or more")
    p, sizes = parameters, parameters.gpc_sizes()
    known: dict[tuple[object, ...], Prepared] = {}
    prepared: list[Prepared | None] = []
    for link in links:
        if isinstance(link, OpaqueLink):
            prepared.append(None)
            continue
        how = link.clusters, link.registers, link.repeats
        key = (id(link.launch), *how)
        if key not in known:
            known[key] = Prepared(link.launch, p, *how)
        prepared.append(known[key])
    if gpcs is None:
        gpcs = len(sizes) if sum(_items(each) for each in prepared if each) <= _BUDGET else 1
    part = sizes[:gpcs]
    share = sum(part) / sum(sizes)
    engine, timeline = Engine(), Timeline("SM 0")
    chip = Chip(engine, p, part, share, {0: timeline})
    l2 = L2(p.l2_bytes)
    grids = [
        _grid(chip, link, each, l2, part, share) for link, each in zip(links, prepared, strict=True)
    ]
    Stream(chip, grids).run()
    end = grids[-1].ended
    busy: defaultdict[str, float] = defaultdict(float)
    for sm in chip.sms:
        for unit, cycles in sm.busy().items():
            busy[unit] += cycles / (len(chip.sms) * end)
    busy["L2"] = chip.l2.work / (end * share * p.per_cycle(p.l2_bandwidth))
    busy["HBM"] = chip.hbm.work / (end * share * p.per_cycle(p.hbm_bandwidth))
    times = [_time(grid, p) for grid in grids]
    return ChainTiming(times, dict(busy), part, timeline)


def _items(prepared: Prepared) -> float:
    """Number of trace items of a whole grid."""
    return prepared.repeat * sum(len(warp) for cta in prepared.ctas for warp in cta.warps)


def _time(grid: Ordered, p: Parameters) -> LinkTime:
    begun = grid.opened
    if grid.dependent and grid.before is not None:
        begun = max(begun, grid.before.ended + p.grid_flush * 1e3 * p.clock)
    opened, begun, ended = (p.microseconds(at) for at in (grid.opened, begun, grid.ended))
    return LinkTime(grid.label, opened, begun, ended, grid.hbm)


def _supply(link: Link, prepared: Prepared, l2: L2) -> Supply:
    """Supply of a launch's reads from HBM, given the L2 contents that earlier launches left."""
    missing = _missing(link, l2)
    by_operand = (lambda each: missing[each.name]) if link.operands else None
    cached = prepared.script.cached
    return Supply(prepared.ctas, prepared.repeat, cached, link.operands, by_operand)


def _missing(link: Link | OpaqueLink, l2: L2) -> dict[str, float]:
    """Bytes of each operand missing in L2 when a launch starts; L2 is then updated."""
    missing = {each.name: l2.read(each) for each in link.operands}
    for name, nbytes in link.writes.items():
        l2.write(name, nbytes)
    return missing


def _grid(
    chip: Chip,
    link: Link | OpaqueLink,
    prepared: Prepared | None,
    l2: L2,
    gpcs: tuple[int, ...],
    share: float,
) -> Ordered:
    """Part of a launch that runs on GPCs of the given sizes, with ``share`` of the bandwidth.

    The part is rounded up, so that it has as many waves as the whole grid on the whole chip; the
    clusters' bytes are scaled to compensate.
    """
    if isinstance(link, OpaqueLink):
        return OpaqueGrid(chip, link, sum(_missing(link, l2).values()))
    assert prepared is not None
    supply = _supply(link, prepared, l2)
    here = sum(sms // prepared.size for sms in gpcs)
    count = math.ceil(prepared.clusters * here / prepared.places)
    dependent = bool(link.launch.attributes.get(_ATTRIBUTE))
    scale = prepared.clusters * share / count
    return Grid(chip, prepared, supply, prepared.some(count), dependent, scale, link.label)
