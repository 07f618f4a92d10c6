"""Instructions that one thread runs in sequence, each with one recorded result."""

import numpy as np

from tests.test_emulator.silicon.case import Array, Case
from tests.test_emulator.silicon.ptx_text import PROLOGUE, module, shared_array

# Results of a thread are in the column of its index in the grid.
_PLACE = """\
{ .reg .b32 %a, %b, %c;
mov.u32 %a, %ctaid.z; mov.u32 %b, %nctaid.y; mul.lo.u32 %a, %a, %b;
mov.u32 %b, %ctaid.y; add.u32 %a, %a, %b; mov.u32 %b, %nctaid.x; mul.lo.u32 %a, %a, %b;
add.u32 %a, %a, %cta_x; mov.u32 %b, %ntid.x; mad.lo.u32 %a, %a, %b, %tid_x;
mad.wide.u32 %d31, %a, 4, %out; }"""


class Script:
    """Body of thread 0 (or of every thread) that stores results in consecutive 32-bit words.

    Attributes:
        lines: lines of PTX emitted so far.
        labels: name of each result.
        inputs: arrays, with their addresses in ``%<name>``.
    """

    def __init__(
        self,
        name: str,
        threads: int = 1,
        inputs: dict[str, Array] | None = None,
        grid: tuple[int, int, int] = (1, 1, 1),
        cluster: tuple[int, int, int] = (1, 1, 1),
    ) -> None:
        self.name = name
        self.threads = threads
        self.inputs = inputs or {}
        self.grid = grid
        self.cluster = cluster
        self.lines = [PROLOGUE, _PLACE]
        self.labels: list[str] = []

    def run(self, text: str) -> None:
        """Emit instructions that give no result to record."""
        self.lines.append(text)

    def keep(self, label: str, text: str, register: str = "%r0") -> None:
        """Emit instructions, and record a 32-bit register."""
        offset = len(self.labels) * 4 * self._columns()
        self.lines += [text, f"st.global.b32 [%d31+{offset}], {register};"]
        self.labels.append(label)

    def ask(self, label: str, text: str) -> None:
        """Emit instructions, and record predicate ``%p0`` as 1 or 0."""
        self.keep(label, f"{text} selp.b32 %r0, 1, 0, %p0;")

    def _columns(self) -> int:
        return self.threads * int(np.prod(self.grid))

    def case(self, shared: int = 128, dynamic_shared: int = 0) -> Case:
        declarations = shared_array(shared)
        if dynamic_shared:
            declarations += "\n.extern .shared .align 16 .b8 more[];"
        return Case(
            self.name,
            module([*self.inputs, "out"], self.lines, declarations=declarations),
            self.inputs,
            {"out": np.zeros((len(self.labels), self._columns()), "u4")},
            grid=self.grid,
            block=(self.threads, 1, 1),
            cluster=self.cluster,
            dynamic_shared=dynamic_shared,
            rows={"out": self.labels},
        )
