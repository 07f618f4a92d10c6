"""Launch of a chain with a known time but no trace, such as another library's kernel."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.emulator.timing.chip import Chip
from tests.emulator.timing.grid import Ordered
from tests.emulator.timing.supply import Operand


@dataclass(frozen=True)
class OpaqueLink:
    """Launch of a chain, with a known time but no trace.

    The launch occupies no SM and takes no bandwidth from other launches.

    Attributes:
        label: name of the launch.
        microseconds: time from the moment when the launch may read its predecessor's results to its
            end.
        dependent: whether the launch takes part in dependent launches: it opens as soon as its
            predecessor permits, permits its successor immediately, and waits for its predecessor.
        operands, writes: as in ``Link``, except that addresses do not matter.
    """

    label: str
    microseconds: float
    dependent: bool = False
    operands: tuple[Operand, ...] = ()
    writes: dict[str, float] = field(default_factory=dict)


class OpaqueGrid(Ordered):
    """An :class:`OpaqueLink` in a stream."""

    def __init__(self, chip: Chip, link: OpaqueLink, hbm: float) -> None:
        super().__init__(chip, link.label, link.dependent)
        self.hbm = hbm
        self._cycles = link.microseconds * 1e3 * chip.p.clock

    def start(self, ended: Callable[[], None]) -> None:
        """Start once the preceding grid is complete; ``ended`` is called at the end."""
        engine = self.chip.engine

        def body() -> None:
            engine.at(engine.now + self._cycles, ended)

        if self.dependent:
            self.let_next_open()
        if self.before is None or not self.dependent or self.before.wait(body):
            body()
