"""Clocks that strong writes publish, and the scopes required to acquire them."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.emulator.memory.clocks import Clocks, Scope

if TYPE_CHECKING:
    from tests.emulator.machine.warp import Warp

GLOBAL = -1
Place = tuple[int, int]  # number of the cluster whose shared memory it is, or GLOBAL; address

_WIDEST = 16  # bytes of a strong access


def poll_key(place: Place) -> Place:
    """Key shared by a write and the polls of any part of its bytes."""
    return place[0], place[1] // _WIDEST


@dataclass
class Published:
    """Clocks that the strong writes of one address publish.

    Attributes:
        clocks: clocks of all writes, joined.
        scope: narrowest scope of the writes.
        ctas: CTAs that wrote, by cluster and rank.
    """

    clocks: Clocks = field(default_factory=Clocks)
    scope: Scope = Scope.SYS
    ctas: set[tuple[int, int]] = field(default_factory=set)

    def add(self, writer: "Warp", handed: Clocks, scope: Scope) -> None:
        """Join the clocks published by one write."""
        self.clocks.join(handed)
        self.scope = min(self.scope, scope)
        self.ctas.add((writer.cta.cluster.number, writer.cta.rank))

    def reach(self, reader: "Warp") -> Scope:
        """Narrowest scope that includes the reader and all writers."""
        cluster, rank = reader.cta.cluster.number, reader.cta.rank
        if self.ctas == {(cluster, rank)}:
            return Scope.CTA
        return Scope.CLUSTER if {c for c, _ in self.ctas} == {cluster} else Scope.GPU

    def seen(self, reader: "Warp", scope: Scope) -> Clocks:
        """Clocks learned by a read of ``scope``."""
        well = min(scope, self.scope) >= self.reach(reader)
        return self.clocks if well else self.clocks.narrowed()
