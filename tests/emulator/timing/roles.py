"""Names of warps and waits: the kind of work, and its line in the kernel's source."""

from tests.emulator.codegen import Program
from tests.emulator.machine.trace import Event, WarpTrace

# A warp's role is named by the first listed kind among its events.
_ROLES = {
    "mma": "MMA",
    "copy": "TMA load",
    "async_copy": "cp.async load",
    "tensor_load": "tensor memory reader",
    "store": "TMA store",
    "tensor_store": "tensor memory writer",
    "launch_control": "scheduler",
    "write": "store",
    "read": "load",
}


def place(program: Program, line: int) -> str:
    """Source line of a PTX line, without folders; the PTX line if the source is unknown."""
    return program.where(line).source.rpartition("/")[2] or f"PTX line {line}"


def role_of(program: Program, trace: WarpTrace) -> str:
    """Role such as ``MMA (gemm.py:310)``."""
    first: dict[str, Event] = {}
    for item in trace:
        if isinstance(item, Event):
            first.setdefault(item.kind, item)
    for kind, name in _ROLES.items():
        if kind in first:
            return f"{name} ({place(program, first[kind].line)})"
    return "other"


def wait_name(program: Program, kind: str, line: int) -> str:
    return f"{kind} at {place(program, line)}"
