"""Launch of a chain that is known by its time alone, such as another library's kernel."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.emulator.timing.chip import Chip
from tests.emulator.timing.grid import Ordered
from tests.emulator.timing.supply import Operand


@dataclass(frozen=True)
class OpaqueLink:
    """One launch of a chain that nobody traced.

    It holds no room on an SM and takes no bandwidth from the others.

    Attributes:
        label: what the launch is.
        microseconds: from the moment that it may read what the launch before wrote to its end.
        dependent: whether it takes part in dependent launches: it opens as soon as the one before
            lets it, lets the next one open at once, and waits for the one before.
        operands, writes: as a ``Link``'s; addresses do not matter.
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
        """Runs from now on, once the grid before is complete; ``ended`` is called at its end."""
        engine = self.chip.engine

        def body() -> None:
            engine.at(engine.now + self._cycles, ended)

        if self.dependent:
            self.let_next_open()
        if self.before is None or not self.dependent or self.before.wait(body):
            body()
