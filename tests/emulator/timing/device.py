"""A device that models the time of every launch."""

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from tests.emulator.findings import LaunchError
from tests.emulator.machine.gpu import Gpu
from tests.emulator.machine.launch import Dimensions, Launch
from tests.emulator.machine.schedule import Schedule
from tests.emulator.machine.sm import Sharing
from tests.emulator.ptx.syntax import Module
from tests.emulator.timing.spread import spread


class TimedGpu(Gpu):
    """Device that traces every launch, and passes each finished launch to a callback.

    Attributes:
        finished: callback for each launch; None ignores launches.
        most: maximum number of clusters of a grid to run, spread over the grid; None for all.
            Omitted clusters write nothing, and no cluster may wait for them.
        backwards: whether the last cluster of a grid runs first.
    """

    finished: Callable[[Launch], None] | None = None
    most: int | None = None
    backwards: bool = False

    def clusters_to_run(self, count: int) -> Sequence[int]:
        chosen = range(count) if self.most is None else spread(count, min(count, self.most))
        return chosen[::-1] if self.backwards else chosen

    def overlapped(self, sharing: Sharing = Sharing()) -> NoReturn:  # noqa: B008 — frozen
        """Refuse overlap: each launch and its traces are passed on as soon as the launch ends.

        Raises:
            LaunchError: always.
        """
        raise LaunchError(
            "overlapped: a TimedGpu hands over each launch once it has run; use timing.chain for "
            "the time of launches that overlap"
        )

    def launch(
        self,
        module: Module,
        kernel: str,
        grid: Dimensions,
        block: Dimensions,
        cluster: Dimensions = (1, 1, 1),
        dynamic_shared: int = 0,
        parameters: list[bytes] | None = None,
        attributes: Mapping[str, int] | None = None,
        schedule: Schedule | None = None,
        traced: bool = True,
        stream: int = 0,
    ) -> Launch:
        launch = super().launch(
            module,
            kernel,
            grid,
            block,
            cluster,
            dynamic_shared,
            parameters,
            attributes,
            schedule,
            traced,
            stream,
        )
        if self.finished is not None:
            self.finished(launch)
        return launch
