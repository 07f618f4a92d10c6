"""Room on SMs: what a CTA takes of one, and which SMs of one GPC can hold a cluster."""

from typing import TYPE_CHECKING, NamedTuple

from tests.emulator.timing.errors import TimingError
from tests.emulator.timing.parameters import Parameters

if TYPE_CHECKING:
    from tests.emulator.machine.launch import Launch
    from tests.emulator.timing.chip import Sm

_RESERVED_BYTES = 1024  # of shared memory, for the system, with each CTA
_WARP = 32


class Needs(NamedTuple):
    """Needs of one CTA.

    Attributes:
        shared: bytes of shared memory, with those that the system reserves.
        threads: in whole warps.
        registers: of all threads.
    """

    shared: int
    threads: int
    registers: int

    def per_sm(self, p: Parameters) -> int:
        """CTAs that an empty SM holds; at least one."""
        limits = (
            p.shared_per_sm // self.shared,
            p.threads_per_sm // self.threads,
            p.registers_per_sm // self.registers,
            p.ctas_per_sm,
        )
        return int(max(1, min(limits)))


def needs_of(launch: "Launch", registers: int = 0) -> Needs:
    """Needs of each CTA of ``launch``.

    Args:
        launch: whose shared memory and threads count.
        registers: of a thread; 0 for unknown, which then limit nothing.
    """
    threads = -(-launch.threads // _WARP) * _WARP
    each = max(1, -(-registers // 8) * 8)
    return Needs(launch.shared_bytes + _RESERVED_BYTES, threads, each * threads)


class Room:
    """Room left on one SM."""

    def __init__(self, p: Parameters) -> None:
        self._p = p
        self.ctas = 0
        self._shared = self._threads = self._registers = 0

    def holds(self, needs: Needs) -> bool:
        """Whether one more CTA fits; an empty SM holds any, whatever a caller said of it."""
        p = self._p
        return not self.ctas or (
            self.ctas < p.ctas_per_sm
            and self._shared + needs.shared <= p.shared_per_sm
            and self._threads + needs.threads <= p.threads_per_sm
            and self._registers + needs.registers <= p.registers_per_sm
        )

    def take(self, needs: Needs, count: int = 1) -> None:
        """Takes what ``count`` CTAs need; a negative number gives it back."""
        self.ctas += count
        self._shared += count * needs.shared
        self._threads += count * needs.threads
        self._registers += count * needs.registers


class Floor:
    """SMs by GPC. A cluster has an SM for each of its CTAs, all in one GPC."""

    def __init__(self, sms: list["Sm"]) -> None:
        self._gpcs: dict[int, list[Sm]] = {}
        for sm in sms:
            self._gpcs.setdefault(sm.gpc, []).append(sm)

    def find(self, size: int, needs: Needs) -> list["Sm"] | None:
        """SMs for a cluster, those with the fewest CTAs; None while there is no room."""
        best: tuple[int, int] | None = None
        found: list[Sm] | None = None
        for gpc, sms in self._gpcs.items():
            fitting = [sm for sm in sms if sm.room.holds(needs)]
            if len(fitting) < size:
                continue
            chosen = sorted(fitting, key=lambda sm: sm.room.ctas)[:size]
            taken = (sum(sm.room.ctas for sm in chosen), gpc)
            if best is None or taken < best:
                best, found = taken, chosen
        return found


def clusters_at_once(gpcs: tuple[int, ...], size: int) -> int:
    """Clusters of ``size`` CTAs that GPCs of so many SMs hold, with a CTA on each SM.

    Raises:
        TimingError: no GPC holds one.
    """
    count = sum(sms // size for sms in gpcs)
    if not count:
        raise TimingError(
            f"cluster: {size} CTAs, a GPC has {max(gpcs)} SMs and must hold all of them; "
            "launch smaller clusters"
        )
    return count
