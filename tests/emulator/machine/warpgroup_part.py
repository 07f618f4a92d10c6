"""One warp's view of its warpgroup: wgmma groups, and registers in flight."""

from typing import TYPE_CHECKING

from tests.emulator.findings import DivergentExecution, MissingRegisterFence, UnwaitedMma
from tests.emulator.wgmma.fragments import Floats

if TYPE_CHECKING:
    from tests.emulator.machine.warp import Warp
    from tests.emulator.machine.warpgroup import Warpgroup
    from tests.emulator.ptx.register_tuples import RegisterTuples


class WarpgroupPart:
    """One warp's part of a warpgroup: its groups of wgmma, and the state of its registers.

    Attributes:
        group: number of the open group, from 1.
        touched: register tuples used by other instructions since the last wgmma.fence, with the PTX
            line of the use.
        flying: register tuples that a wgmma in flight uses, with the group and PTX line.
        issued: number of wgmma instructions issued so far.
    """

    def __init__(self, warp: "Warp", warpgroup: "Warpgroup", tuples: "RegisterTuples") -> None:
        self._warp = warp
        self._tuples = tuples
        self.warpgroup = warpgroup
        self.group = 1
        self.touched: dict[int, int] = {}
        self.flying: dict[int, tuple[int, int]] = {}
        self.issued = 0
        self._fenced = False
        self._ends: list[int] = []  # wgmma instructions up to the end of each group

    def require_whole(self, line: int) -> None:
        """Check that the warpgroup has four whole warps."""
        if not self.warpgroup.whole:
            self._warp.launch.report(
                DivergentExecution(
                    f"wgmma in a CTA of {self._warp.cta.threads} threads: {self.warpgroup.name} do "
                    "not all exist; a warpgroup is 128 threads from a multiple of 128",
                    self._warp.where(line),
                )
            )

    def fence(self) -> None:
        """wgmma.fence: make the current values of registers usable by wgmma."""
        self._fenced = True
        self.touched.clear()

    def commit(self) -> None:
        """wgmma.commit_group: close the open group."""
        self._ends.append(self.issued)
        self.group += 1

    def until(self, pending: int) -> int:
        """The group covered by a wait for all except the ``pending`` latest groups; 0 for none."""
        return max(0, len(self._ends) - pending)

    def done(self, group: int) -> bool:
        return group == 0 or self.warpgroup.completed >= self._ends[group - 1]

    def land(self, group: int) -> dict[int, Floats]:
        """Retire groups up to ``group``; returns the registers of the completed accumulators."""
        found = {}
        if group:
            self._warp.actor.finished(self.warpgroup.pipe, group)
        for number in [n for n, (its, _) in self.flying.items() if its <= group]:
            del self.flying[number]
            if number in self._tuples.accumulators:
                found[number] = self.warpgroup.sums(number, self._warp)
        return found

    def take(self, accumulator: int, a: int | None, line: int) -> None:
        """Check that a wgmma's registers are fenced, and not used by another wgmma in flight."""
        own = (accumulator,) if a is None else (accumulator, a)
        if not self._fenced:
            self._report_fence(line, "before the first wgmma of a warp")
            self._fenced = True
        for number in own:
            if number in self.touched:
                used = self.touched.pop(number)
                text = self._warp.where(used).text.strip()
                self._report_fence(line, f"after PTX line {used}, {text}, which uses its registers")
            for other in self._tuples.overlaps[number]:
                self.touch(other, "use", self._shared(number, other), line)
        for number in own:
            self.flying[number] = self.group, line

    def _shared(self, number: int, other: int) -> str:
        registers = self._tuples.registers
        return min(set(registers[number]) & set(registers[other]))

    def _report_fence(self, line: int, why: str) -> None:
        self._warp.launch.report(
            MissingRegisterFence(f"wgmma.fence is missing {why}", self._warp.where(line))
        )

    def touch(self, number: int, verb: str, register: str, line: int) -> None:
        """Report the use of a register while a wgmma in flight uses it."""
        if number not in self.flying:
            return
        group, issued = self.flying[number]
        which = "an accumulator" if number in self._tuples.accumulators else "A"
        wait = "wgmma.wait_group"
        if group == self.group:
            wait = "wgmma.commit_group and wgmma.wait_group"
        self._warp.launch.report(
            UnwaitedMma(
                f"{verb} of {register}, {which} of the wgmma of PTX line {issued} in flight; "
                f"{wait} between the two is missing",
                self._warp.where(line),
            )
        )

    def leave(self) -> None:
        """Record the exit of the warp."""
        self.warpgroup.leave(self._warp)
        if self.flying:
            line = min(line for _, line in self.flying.values())
            self._warp.launch.report(
                UnwaitedMma(
                    f"{self._warp.name} exits with a wgmma in flight; wgmma.wait_group is missing",
                    self._warp.where(line),
                )
            )
