"""A device that models the time of everything it runs."""

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
    """Traces every launch, and hands it over once it is done.

    Attributes:
        finished: called with each launch; None leaves it be.
        most: clusters of a grid that run, spread over it; None: all. Those that are left out write
            nothing, and none may wait for them.
        backwards: run the last cluster of a grid first.
    """

    finished: Callable[[Launch], None] | None = None
    most: int | None = None
    backwards: bool = False

    def clusters_to_run(self, count: int) -> Sequence[int]:
        chosen = range(count) if self.most is None else spread(count, min(count, self.most))
        return chosen[::-1] if self.backwards else chosen

    def overlapped(self, sharing: Sharing = Sharing()) -> NoReturn:  # noqa: B008 — frozen
        """Refuse: launches are handed over, with their traces, as they end one by one.

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
