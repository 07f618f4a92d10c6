"""A warpgroup: four warps that execute wgmma together, and its wgmma in flight.

Warps arrive at a wgmma one after the other. The last warp hands the wgmma to the tensor core, which
runs the warpgroup's instructions in order, each when the schedule permits. The warpgroup keeps the
accumulators of a chain of wgmma; a warp gets its accumulator rows from the wait that covers the
chain's last wgmma.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tests.emulator.findings import DivergentExecution
from tests.emulator.memory.clocks import Clock, Origin, Snapshot
from tests.emulator.memory.shadow import MANY_LANES, Access
from tests.emulator.tcgen05.descriptors import SharedDescriptor
from tests.emulator.tcgen05.formats import Element
from tests.emulator.tcgen05.operands import OperandShape, chunk_index, gather
from tests.emulator.tcgen05.operands import decode_operand as decode
from tests.emulator.wgmma.fragments import (
    ROWS,
    WARPS,
    Floats,
    Words,
    a_matrix,
    d_matrix,
    d_registers,
    depth,
)
from tests.emulator.wgmma.rounding import multiply_accumulate

if TYPE_CHECKING:
    from tests.emulator.machine.cta import Cta
    from tests.emulator.machine.warp import Warp


@dataclass(frozen=True)
class Form:
    """Modifiers of a wgmma.

    Attributes:
        n: number of columns of D.
        element: element type of A and B.
        negative: whether the product is subtracted.
        a_transposed, b_transposed: whether M or N, not K, is the leading dimension.
    """

    n: int
    element: Element
    negative: bool = False
    a_transposed: bool = False
    b_transposed: bool = False

    @property
    def a_shape(self) -> OperandShape:
        return OperandShape(ROWS, depth(self.element), self.element, self.a_transposed)

    @property
    def b_shape(self) -> OperandShape:
        return OperandShape(self.n, depth(self.element), self.element, self.b_transposed)


@dataclass
class Multiply:
    """One wgmma of a warpgroup.

    Attributes:
        form: modifiers of the instruction.
        accumulator: number of D's tuple in ``RegisterTuples``.
        adds: whether the product is added to D.
        a: descriptor of A in shared memory, None for A in registers.
        b: descriptor of B in shared memory.
        group: number of the wgmma group, from 1.
        line: PTX line.
        fragments: words of A, one entry per warp that has arrived.
        sums: previous values of D, one entry per warp that has arrived; empty if D is overwritten
            or already in flight.
        before: clocks of each warp that has arrived.
    """

    form: Form
    accumulator: int
    adds: bool
    a: SharedDescriptor | None
    b: SharedDescriptor
    group: int
    line: int
    fragments: dict[int, Words] = field(default_factory=dict)
    sums: dict[int, Floats] = field(default_factory=dict)
    before: dict[int, Snapshot] = field(default_factory=dict)


class Warpgroup:
    """Group of four warps of a CTA; the index of the first is a multiple of four.

    Attributes:
        pipe: component of the wgmma instructions; the clock is the group's number.
        completed: number of completed wgmma instructions.
        waiters: warps that wait for a completion.
    """

    def __init__(self, cta: "Cta", first: int) -> None:
        self._cta = cta
        self.first = first
        self.pipe = cta.launch.events.new_component()
        self.completed = 0
        self.waiters: list[Callable[[], None]] = []
        self._queue = ("wgmma", self.pipe)
        self._sums: dict[int, Floats] = {}
        self._arriving: dict[int, Multiply] = {}
        self._merged: tuple[tuple[Snapshot, ...], Snapshot] | None = None
        # Sequence of the four warps: steps that some warps have executed and others not yet.
        self._steps: deque[tuple[int, object]] = deque()
        self._taken = [0] * WARPS
        self._dropped = 0

    @property
    def name(self) -> str:
        return f"warps {self.first} to {self.first + WARPS - 1} of CTA {self._cta.position}"

    @property
    def whole(self) -> bool:
        """Whether all threads of the warpgroup exist."""
        return self._cta.threads >= 32 * (self.first + WARPS)

    # All warps alike

    def step(self, warp: "Warp", line: int, detail: object = None) -> None:
        """Execute a warp's wgmma instruction; all four warps must execute the same sequence."""
        own = warp.index - self.first
        number = self._taken[own] - self._dropped
        self._taken[own] += 1
        if number < len(self._steps):
            if self._steps[number] != (line, detail):
                self._report_other(warp, line, self._steps[number][0])
            if number == 0 and min(self._taken) > self._dropped:
                self._steps.popleft()
                self._dropped += 1
            return
        self._steps.append((line, detail))
        gone = [w.index for w in self._cta.warps[self.first : self.first + WARPS] if w.exited]
        if gone:
            self._report_missing(warp, line, gone)

    def leave(self, warp: "Warp") -> None:
        """Record a warp's exit; report instructions that only the other warps have executed."""
        number = self._taken[warp.index - self.first] - self._dropped
        if number < len(self._steps):
            line = self._steps[number][0]
            ahead = [
                self.first + i for i, n in enumerate(self._taken) if n - self._dropped > number
            ]
            self._report_missing(self._cta.warps[ahead[0]], line, [warp.index])

    def _report_other(self, warp: "Warp", line: int, other: int) -> None:
        others = "the same with another descriptor or scale-d"
        if line != other:
            others = f"PTX line {other}: {warp.where(other).text.strip()}"
        warp.launch.report(
            DivergentExecution(
                f"wgmma is .aligned: {self.name} must execute the same one, another warp executes "
                f"{others}",
                warp.where(line),
            )
        )

    def _report_missing(self, warp: "Warp", line: int, missing: list[int]) -> None:
        warp.launch.report(
            DivergentExecution(
                f"wgmma is .aligned: all of {self.name} must execute it, warps {missing} exit "
                "without",
                warp.where(line),
            )
        )

    # Multiplying

    def arrive(self, number: int, multiply: Multiply) -> Multiply:
        """Register a warp's arrival at wgmma ``number``; returns the warpgroup's shared record."""
        return self._arriving.setdefault(number, multiply)

    def issue(self, warp: "Warp", number: int) -> None:
        """Queue a wgmma for the tensor core, if all warps have arrived."""
        multiply = self._arriving[number]
        if len(multiply.before) < WARPS:
            return
        del self._arriving[number]
        form, launch = multiply.form, warp.launch
        shape = ROWS, form.n, depth(form.element)
        launch.counters.multiplies[f"wgmma {form.element.ptx_name}", *shape, 1] += 1
        before = self._before_all(multiply)
        accesses = [
            (multiply.b, form.b_shape, self._access(warp, multiply, before, "B")),
        ]
        if multiply.a is not None:
            accesses.append((multiply.a, form.a_shape, self._access(warp, multiply, before, "A")))

        def run() -> None:
            shared = self._cta.shared
            for descriptor, shape, access in accesses:
                start, index = chunk_index(descriptor, shape)
                shared.read_chunks((index + start // 16).reshape(-1), access)
            self._multiply(multiply)
            self.completed += 1
            waiters, self.waiters = self.waiters, []
            for wake in waiters:
                wake()

        warp.issue("tensor", self._queue, run, multiply.line)

    def _multiply(self, multiply: Multiply) -> None:
        """Update the accumulator: exact sums rounded once, or bit-exact sums as on an H200."""
        form, shared = multiply.form, self._cta.shared.whole
        if multiply.a is None:
            words = np.stack([multiply.fragments[warp] for warp in range(WARPS)])
            a = a_matrix(words, form.element)
        else:
            a = decode(gather(shared, multiply.a, form.a_shape), form.a_shape)
        b = decode(gather(shared, multiply.b, form.b_shape), form.b_shape)
        before = None
        if multiply.sums:
            before = d_matrix(np.stack([multiply.sums[warp] for warp in range(WARPS)]))
        elif multiply.adds:
            before = self._sums[multiply.accumulator]
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if form.negative:
                b = -b
            if self._cta.gpu.rounds_like_h200:
                total = multiply_accumulate(a, b, before, form.element)
            else:
                exact = a.astype(np.float64) @ b.T.astype(np.float64)
                total = (exact if before is None else exact + before).astype(np.float32)
        self._sums[multiply.accumulator] = total

    def sums(self, accumulator: int, warp: "Warp") -> Floats:
        """A warp's registers of an accumulator, float32 [register, lane]."""
        return d_registers(self._sums[accumulator], warp.index - self.first)

    def _access(self, warp: "Warp", multiply: Multiply, before: Snapshot, operand: str) -> Access:
        verb, line = f"wgmma read of {operand}", multiply.line
        events = warp.launch.events
        origin = Origin(verb, "async", False, lambda: warp.where(line))
        event = events.new(self.pipe, multiply.group, origin)
        access = Access(events, event, before, before.known["async"], warp.launch.report, self.pipe)
        warps = self._cta.warps[self.first : self.first + WARPS]
        access.unordered = frozenset(event for w in warps for event in w.unordered)
        access.lanes = MANY_LANES
        return access

    def _before_all(self, multiply: Multiply) -> Snapshot:
        """Snapshot of the clocks that precede the wgmma in all four warps."""
        parts = tuple(multiply.before[warp] for warp in range(WARPS))
        if self._merged is None or any(
            a is not b for a, b in zip(self._merged[0], parts, strict=True)
        ):
            merged = Snapshot(parts[0])
            merged.generic = _meet([part.generic for part in parts])
            merged.proxy = _meet([part.proxy for part in parts])
            narrow = {component for part in parts for component in part.narrow}
            merged.narrow = {c: min(part.well_known(c) for part in parts) for c in narrow}
            self._merged = parts, merged
        return self._merged[1]


def _meet(clocks: list[Clock]) -> Clock:
    """Earliest clock of each component that all ``clocks`` have."""
    first, *others = clocks
    return {
        component: min(clock, *(other[component] for other in others))
        for component, clock in first.items()
        if all(component in other for other in others)
    }
