"""A :class:`Timing`'s timeline as Chrome trace-event JSON, for ui.perfetto.dev or chrome://tracing."""

import json
import re
from pathlib import Path
from typing import Any

from tests.emulator.timing.result import Timing

_WARPS, _UNITS = 1, 2  # process numbers: Perfetto shows one group of tracks for each


def trace_events(timing: Timing) -> dict[str, Any]:
    """The JSON object: one track per warp, named by its role, and one per unit of the SM.

    Work of a unit that may overlap, such as TMA copies, becomes asynchronous slices.
    """
    clock = timing.parameters.clock * 1e3  # cycles per microsecond
    roles = {warp.name: warp.role for warp in timing.warps}
    tracks: dict[str, tuple[int, int]] = {}
    events: list[dict[str, Any]] = []
    for name in sorted({s.track for s in timing.timeline.slices}, key=natural):
        process = _WARPS if "warp" in name else _UNITS
        number = sum(1 for at in tracks.values() if at[0] == process) + 1
        tracks[name] = (process, number)
        title = f"{name}: {roles[name]}" if name in roles else name
        events.append(metadata("thread_name", title, process, number))
        order = {"sort_index": number}
        events.append(metadata("thread_sort_index", "", process, number) | {"args": order})
    kernel = timing.kernel[:60]
    events.append(metadata("process_name", f"warps of {timing.timeline.name}: {kernel}", _WARPS))
    events.append(metadata("process_name", f"units of {timing.timeline.name}", _UNITS))
    for number, part in enumerate(timing.timeline.slices):
        process, thread = tracks[part.track]
        common = {"name": part.name, "cat": part.track, "pid": process, "tid": thread}
        start, end = part.start / clock, part.end / clock
        if part.overlaps:
            events.append(common | {"ph": "b", "id": number, "ts": start})
            events.append(common | {"ph": "e", "id": number, "ts": end})
        else:
            cycles = {"cycles": part.end - part.start}
            events.append(common | {"ph": "X", "ts": start, "dur": end - start, "args": cycles})
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def write(timing: Timing, path: Path) -> None:
    """Write the timeline to a file for trace viewers."""
    path.write_text(json.dumps(trace_events(timing)))


def metadata(kind: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    """Event that names a process or a thread."""
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts ``warp 10`` after ``warp 9``."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
