"""Residency: the SM resources of a CTA, and the SMs of one GPC that can hold a cluster."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from tests.emulator.machine.limits import Limits
from tests.emulator.ptx.syntax import Kernel

if TYPE_CHECKING:
    from tests.emulator.machine.launch import Launch

_WARP = 32
_REGISTER_UNIT = 8  # per thread: allocation granularity
_MAX_REGISTERS = 248  # per thread, in whole units


class Needs(NamedTuple):
    """Resources that one CTA needs.

    Attributes:
        shared: bytes of shared memory, including bytes reserved by the system.
        threads: threads, in whole warps.
        registers: number of registers of all threads.
    """

    shared: int
    threads: int
    registers: int

    def per_sm(self, limits: Limits) -> int:
        """Number of CTAs that an empty SM holds; at least one."""
        found = (
            limits.shared_per_sm // self.shared,
            limits.threads_per_sm // self.threads,
            limits.registers // self.registers,
            limits.ctas_per_sm,
        )
        return max(1, min(found))


def needs_of(launch: "Launch", registers: int = 0) -> Needs:
    """Needs of each CTA of ``launch``.

    Args:
        launch: launch with its shared memory and threads.
        registers: registers per thread; 0 for unknown, which limits nothing.
    """
    threads = -(-launch.threads // _WARP) * _WARP
    each = max(1, -(-registers // _REGISTER_UNIT) * _REGISTER_UNIT)
    return Needs(launch.shared_bytes + launch.gpu.limits.reserved, threads, each * threads)


def registers_of(kernel: Kernel, declared: Mapping[str, int], limits: Limits) -> int:
    """Number of registers per thread at the start of a kernel; 0 for unknown.

    PTX states the number only with ``.maxnreg``. Where setmaxnreg moves registers between warps,
    ptxas gives each thread the share that ``.maxntid`` and ``.minnctapersm`` leave (assumed).

    Args:
        kernel: parsed kernel.
        declared: known registers per thread, by kernel name.
        limits: limits of the chip.
    """
    if kernel.name in declared:
        return declared[kernel.name]
    if kernel.max_registers:
        return kernel.max_registers
    threads = kernel.max_block or math.prod(kernel.required_block or (0,))
    if not threads or not any(i.parts[0] == "setmaxnreg" for i in kernel.body):
        return 0
    each = limits.registers // (threads * kernel.min_ctas)
    return min(each // _REGISTER_UNIT * _REGISTER_UNIT, _MAX_REGISTERS)


class Room:
    """Room left on one SM."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.ctas = 0
        self._shared = self._threads = self._registers = 0

    def holds(self, needs: Needs) -> bool:
        """Whether one more CTA fits; an empty SM holds any CTA, regardless of the stated needs."""
        limits = self._limits
        return not self.ctas or (
            self.ctas < limits.ctas_per_sm
            and self._shared + needs.shared <= limits.shared_per_sm
            and self._threads + needs.threads <= limits.threads_per_sm
            and self._registers + needs.registers <= limits.registers
        )

    def take(self, needs: Needs, count: int = 1) -> None:
        """Reserve the resources of ``count`` CTAs; a negative count releases resources."""
        self.ctas += count
        self._shared += count * needs.shared
        self._threads += count * needs.threads
        self._registers += count * needs.registers


class Place(Protocol):
    """Interface of an SM for the placement of CTAs."""

    gpc: int
    room: Room


SomePlace = TypeVar("SomePlace", bound=Place)


class Floor(Generic[SomePlace]):
    """SMs by GPC. A cluster takes one SM for each of its CTAs, all in one GPC.

    Args:
        sms: SMs of the chip, or of a part of the chip.
        packed: whether a cluster goes to the SMs with the most CTAs instead of the fewest.
    """

    def __init__(self, sms: Iterable[SomePlace], packed: bool = False) -> None:
        self._gpcs: dict[int, list[SomePlace]] = {}
        self._sign = -1 if packed else 1
        for sm in sms:
            self._gpcs.setdefault(sm.gpc, []).append(sm)

    def find(self, size: int, needs: Needs) -> list[SomePlace] | None:
        """SMs for a cluster of ``size`` CTAs; None while there is no room."""
        best: tuple[int, int] | None = None
        found: list[SomePlace] | None = None
        for gpc, sms in self._gpcs.items():
            fitting = [sm for sm in sms if sm.room.holds(needs)]
            if len(fitting) < size:
                continue
            chosen = sorted(fitting, key=lambda sm: self._sign * sm.room.ctas)[:size]
            taken = (self._sign * sum(sm.room.ctas for sm in chosen), gpc)
            if best is None or taken < best:
                best, found = taken, chosen
        return found

    def take(self, size: int, needs: Needs) -> list[SomePlace] | None:
        """SMs as from :meth:`find`, with the room for the cluster reserved."""
        found = self.find(size, needs)
        for sm in found or ():
            sm.room.take(needs)
        return found

    def give(self, sms: Iterable[SomePlace], needs: Needs) -> None:
        """Release a cluster's room."""
        for sm in sms:
            sm.room.take(needs, -1)
