"""Input of the replay, from a traced launch: script, clusters, and resources of a CTA."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.emulator.machine.residency import needs_of
from tests.emulator.machine.trace import CtaTrace, Event
from tests.emulator.timing.barriers import expected_arrivals, participants
from tests.emulator.timing.costs import Costs
from tests.emulator.timing.errors import TimingError
from tests.emulator.timing.parameters import Parameters
from tests.emulator.timing.residency import clusters_at_once
from tests.emulator.timing.script import Script
from tests.emulator.timing.segments import segments_of
from tests.emulator.timing.spread import spread

if TYPE_CHECKING:
    from tests.emulator.machine.launch import Launch

Cluster = list[CtaTrace]
# Loads with these modifiers bypass L1.
_UNCACHED = frozenset(
    (
        *("cg", "cs", "cv", "lu", "L1::no_allocate", "volatile", "mmio"),
        *("relaxed", "acquire"),
    )
)


class Prepared:
    """Launch ready to be replayed.

    Args:
        launch: launch from ``Gpu.launch(..., traced=True)``.
        p: parameters of the chip.
        clusters: number of clusters of the grid; None: the number of clusters in ``traced``.
        registers: registers per thread; 0 for unknown.
        repeats: indices of the traced clusters that the grid's clusters repeat in turn; empty: all
            traced clusters, in order.

    Attributes:
        traced: traced clusters that the grid repeats; a cluster's CTAs are in order of rank.
        size: number of CTAs of a cluster.
        clusters: number of clusters of the grid.
        needs: shared memory, threads and registers that a CTA occupies on an SM.
        deep: number of CTAs that an SM holds if no other launch is resident.
        places: number of clusters that the chip holds with one CTA per SM.
        l1_bytes: bytes of an SM's shared memory that the CTAs leave to L1.
        script: state that all clusters share.

    Raises:
        TimingError: the launch was not traced, or no GPC holds its clusters.
    """

    def __init__(
        self,
        launch: "Launch",
        p: Parameters,
        clusters: int | None = None,
        registers: int = 0,
        repeats: Sequence[int] = (),
    ) -> None:
        if launch.traces is None:
            raise TimingError("launch: has no trace, run it with traced=True")
        found: defaultdict[int, Cluster] = defaultdict(list)
        for trace in launch.traces:
            found[trace.cluster].append(trace)
        if not found:
            raise TimingError("launch: its trace has no CTA")
        self.launch = launch
        self._run = [
            sorted(cluster, key=lambda cta: cta.rank) for _, cluster in sorted(found.items())
        ]
        self.traced = [self._run[number] for number in repeats] or self._run
        self.size = len(self.traced[0])
        self.clusters = clusters or len(self.traced)
        self.needs = needs_of(launch, registers)
        self.deep = self.needs.per_sm(p.limits)
        self.places = clusters_at_once(p.gpc_sizes(), self.size)
        self.l1_bytes = max(0.0, p.l1_bytes - self.deep * self.needs.shared)
        self.script = self._read_script(p)

    @property
    def ctas(self) -> list[CtaTrace]:
        """CTAs of the traced clusters."""
        return [cta for cluster in self.traced for cta in cluster]

    @property
    def repeat(self) -> float:
        """Number of times that the grid repeats the traced clusters."""
        return self.clusters / len(self.traced)

    @property
    def resident(self) -> int:
        """Number of clusters that the chip holds if this launch runs alone."""
        return self.places * self.deep

    def repeated(self, count: int) -> list[Cluster]:
        """``count`` clusters: the traced clusters, repeated in order."""
        return [self.traced[number % len(self.traced)] for number in range(count)]

    def some(self, count: int) -> list[Cluster]:
        """Sample of ``count`` clusters that represents the whole grid, even if only a part was run.

        The sample is not the first ``count`` clusters: with persistent CTAs, the first clusters
        have more work than the last.
        """
        if count >= len(self.traced):
            return self.repeated(count)
        return [self.traced[number] for number in spread(len(self.traced), count)]

    def _read_script(self, p: Parameters) -> Script:
        program, ctas = self.launch.program, [cta for cluster in self._run for cta in cluster]
        body = program.kernel.body
        return Script(
            program,
            segments_of(program.flow, Costs(p)),
            expected_arrivals(ctas),
            participants(ctas),
            {
                item.key: cta.position
                for cta in ctas
                for trace in cta.warps
                for item in trace
                if isinstance(item, Event) and item.kind == "wait"
            },
            frozenset(i.line for i in body if i.parts[:2] == ("mbarrier", "test_wait")),
            frozenset(i.line for i in body if i.parts[0] == "ld" and not _UNCACHED & {*i.parts}),
        )
