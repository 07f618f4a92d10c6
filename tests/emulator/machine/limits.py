"""Limits of a chip and of its SMs, for launches, residency and time."""

from dataclasses import dataclass

CTA_SLOTS = 32  # per SM, compute capability 9.0 and 10.0


@dataclass(frozen=True)
class Limits:
    """Limits of one chip.

    Attributes:
        sms: number of streaming multiprocessors.
        shared: maximum bytes of shared memory of a CTA; ``shared_per_sm``: of an SM, including the
            bytes reserved by the system.
        threads: maximum threads of a CTA; ``threads_per_sm``: maximum resident threads of an SM.
        cluster: maximum portable cluster size, in CTAs.
        registers: number of 32-bit registers of an SM.
        ctas_per_sm: maximum resident CTAs of an SM.
        gpcs: number of graphics processing clusters; a cluster of CTAs lies within one GPC.
    """

    sms: int = 148
    shared: int = 232448
    shared_per_sm: int = 233472
    threads: int = 1024
    threads_per_sm: int = 2048
    cluster: int = 16
    registers: int = 65536
    ctas_per_sm: int = CTA_SLOTS
    gpcs: int = 8

    @property
    def reserved(self) -> int:
        """Bytes of shared memory that the system takes with each CTA."""
        return self.shared_per_sm - self.shared

    def gpc_sizes(self) -> tuple[int, ...]:
        """Number of SMs in each GPC: pairs of SMs, distributed as evenly as possible (assumed)."""
        pairs = -(-self.sms // 2)
        sizes = [2 * ((pairs + number) // self.gpcs) for number in range(self.gpcs)]
        sizes[-1] -= 2 * pairs - self.sms
        return tuple(size for size in sizes if size)


B200 = Limits()
GB300 = Limits(sms=152)
H200 = Limits(sms=132)
