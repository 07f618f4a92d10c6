"""Execution of grids in stream order on simulated SMs, with dependent launches."""

from collections.abc import Sequence
from itertools import pairwise

from tests.emulator.machine.residency import Floor
from tests.emulator.timing.chip import Chip
from tests.emulator.timing.errors import TimingError
from tests.emulator.timing.grid import Grid, Ordered
from tests.emulator.timing.opaque import OpaqueGrid
from tests.emulator.timing.replay import ClusterReplay

_SHOWN = 20  # waiting warps in a deadlock's message


class Stream:
    """Grids in stream order.

    A grid's clusters start in order, as soon as SMs of one GPC have room for all CTAs of the next
    cluster. A dependent grid may start once every CTA of its predecessor has executed
    launch_dependents or has ended; any other grid once all CTAs of its predecessor have ended.

    Args:
        chip: chip that the grids run on.
        grids: grids in order.

    Attributes:
        replays: replays of the clusters that have started.
    """

    def __init__(self, chip: Chip, grids: Sequence[Ordered]) -> None:
        self._chip = chip
        self._engine = chip.engine
        self._floor = Floor(chip.sms)
        self._grids = grids
        self._open = -1
        self.replays: list[ClusterReplay] = []
        for before, grid in pairwise(grids):
            grid.before = before

    def run(self) -> None:
        """Run all grids.

        Raises:
            TimingError: some grids never end.
        """
        self._start_next()
        self._engine.run()
        if any(not grid.complete for grid in self._grids):
            stuck = [warp.stuck for replay in self.replays for warp in replay.warps if warp.stuck]
            raise TimingError(
                "\n  ".join(["trace: its replay ends in a deadlock", *stuck[:_SHOWN]])
            )

    def _start_next(self) -> None:
        self._open += 1
        grid = self._grids[self._open]
        grid.opened = self._engine.now
        if isinstance(grid, OpaqueGrid):
            grid.start(lambda: self._over(grid))
        else:
            self._fill(0.0)
        if self._open + 1 < len(self._grids) and self._grids[self._open + 1].dependent:
            grid.on_release(lambda: self._later(self._chip.p.dependent_launch))

    def _later(self, microseconds: float) -> None:
        delay = microseconds * 1e3 * self._chip.p.clock
        self._engine.at(self._engine.now + delay, self._start_next)

    def _fill(self, delay: float) -> None:
        """Start clusters of the last opened grid while there is room."""
        grid = self._grids[self._open]
        if not isinstance(grid, Grid):
            return
        prepared = grid.prepared
        while grid.waiting:
            sms = self._floor.take(prepared.size, prepared.needs)
            if sms is None:
                return
            number, cluster, repetition = grid.waiting.pop()
            replay = ClusterReplay(grid, number, cluster, sms, repetition, self._ended)
            self.replays.append(replay)
            self._engine.at(self._engine.now + delay, replay.start)

    def _ended(self, replay: ClusterReplay) -> None:
        grid = replay.grid
        self._floor.give(replay.sms, grid.prepared.needs)
        grid.running -= 1
        self._fill(self._chip.p.cta_launch)
        if not grid.running:
            self._over(grid)

    def _over(self, grid: Ordered) -> None:
        """Note the end of a grid, after its last cluster and its writes."""
        grid.ended = self._engine.now
        grid.let_next_open()
        flush = self._chip.p.grid_flush * 1e3 * self._chip.p.clock
        self._engine.at(grid.ended + flush, grid.finish)
        following = self._grids.index(grid) + 1
        if following < len(self._grids) and not self._grids[following].dependent:
            self._later(self._chip.p.grid_launch)
