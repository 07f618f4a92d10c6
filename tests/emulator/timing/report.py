"""Tables that present a :class:`Timing`."""

from rich.console import Console, Group, RenderableType
from rich.table import Table

from tests.emulator.timing.parameters import Parameters
from tests.emulator.timing.result import Timing, WarpTime
from tests.emulator.timing.whole import SpeedOfLight

_UNITS = {"issue": "issue slots", "fma": "FMA", "alu": "ALU", "mufu": "MUFU", "fp64": "FP64"}
_SHOWN_WAITS = 3
_BOUND = 0.7  # busy fraction above which a unit limits the kernel


def report(timing: Timing, least: SpeedOfLight | None = None) -> RenderableType:
    """Table of a launch's time, units and warps, with the ratio to the speed of light ``least``."""
    head = Table.grid(padding=(0, 2))
    head.add_row("kernel", timing.kernel)
    overhead = f"and {timing.launch_us:g} µs to launch it"
    head.add_row(
        "time",
        f"{timing.microseconds:.2f} µs ({timing.cycles:.0f} cycles at "
        f"{timing.parameters.clock:g} GHz), {overhead}",
    )
    head.add_row(
        "grid",
        f"{timing.clusters} clusters, {timing.resident} at a time, {timing.waves} wave(s), "
        + ("all simulated" if timing.exact else "representatives simulated"),
    )
    unit, share = timing.limit
    bound = "" if share > _BOUND else ": latency, waits or the grid's tail set the time"
    head.add_row("busiest unit", f"{_UNITS.get(unit, unit)}, {share:.1%}{bound}")
    if least is not None:
        head.add_row(
            "speed of light",
            f"{least.microseconds:.2f} µs by {least.limit} (tensor cores {least.tensor_us:.2f}, "
            f"HBM {least.hbm_us:.2f}): the kernel reaches "
            f"{least.microseconds / timing.microseconds:.1%}",
        )
    if timing.flops:
        head.add_row(
            "tensor cores",
            f"{timing.tflops:.0f} TFLOP/s, pipes busy {timing.tensor_efficiency:.1%}; "
            f"{timing.sustained_microseconds:.2f} µs if power holds the clock at "
            f"{timing.parameters.sustained_clock:g} GHz",
        )
    head.add_row(
        "global reads", f"{timing.read_bytes / 1e6:.2f} MB, HBM {timing.hbm_bytes / 1e6:.2f}"
    )
    for note in timing.notes:
        head.add_row("note", note)
    return Group(head, _units(timing), _warps(timing.warps))


def _units(timing: Timing) -> Table:
    table = Table(title="units: part of the kernel's time they work, mean over all SMs")
    table.add_column("unit")
    table.add_column("busy", justify="right")
    for unit, share in sorted(timing.busy.items(), key=lambda item: -item[1]):
        if share:
            table.add_row(_UNITS.get(unit, unit), f"{share:.1%}")
    return table


def _warps(warps: list[WarpTime]) -> Table:
    table = Table(title="warps of one cluster")
    for column in ("warp", "role", "cycles", "running", "contended", "waits most for"):
        table.add_column(column, justify="left" if column in ("warp", "role") else "right")
    for warp in warps:
        total = warp.total or 1.0
        waits = list(warp.waiting.items())[:_SHOWN_WAITS]
        table.add_row(
            warp.name,
            warp.role,
            f"{warp.total:.0f}",
            f"{warp.running / total:.0%}",
            f"{warp.contended / total:.0%}",
            "\n".join(f"{name}: {cycles / total:.0%}" for name, cycles in waits),
        )
    return table


def parameter_table(parameters: Parameters) -> Table:
    """Table of the parameters with their sources."""
    table = Table(title="parameters")
    for column in ("parameter", "value", "unit", "known", "source"):
        table.add_column(column)
    for row in parameters.rows():
        known = "assumed" if row.assumed else "yes"
        table.add_row(row.name, f"{row.value:g}", row.unit, known, row.source)
    return table


def show(renderable: RenderableType) -> None:
    Console().print(renderable)
