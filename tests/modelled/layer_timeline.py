"""Timeline of a modelled layer as Chrome trace-event JSON, for ui.perfetto.dev."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.emulator.timing import ChainTiming
from tests.emulator.timing.chain import LinkTime
from tests.emulator.timing.perfetto import metadata, natural
from tests.emulator.timing.timeline import Slice

LAUNCHES, UNITS, WARPS = 1, 2, 3  # process numbers; each launch's warps form a separate process
SHORTEST = 0.05  # µs: shorter slices are omitted
WAIT = "waits for the launch before"
_LANES = 3  # tracks of overlapping launches: a launch may open before the last but one has ended


class Span(NamedTuple):
    """Range of the chain to display, in microseconds."""

    start: float
    end: float

    def within(self, start: float, end: float) -> tuple[float, float]:
        """Start, relative to the span's start, and duration of the part inside the span."""
        start, end = max(start, self.start), min(end, self.end)
        return round(start - self.start, 3), round(end - start, 3)


def layer_events(timing: ChainTiming, said: Sequence[dict[str, Any]], clock: float) -> Any:
    """JSON object of the last launches of a chain.

    Three groups of tracks: launches on the chip, each from the moment when its CTAs may start;
    units of one SM; and warps of each launch on that SM. Time starts at the end of the preceding
    launch.

    Args:
        timing: timing of the chain.
        said: fields to show for each of the last launches, ``label`` among them.
        clock: GHz.
    """
    links = timing.links[-len(said) :]
    span = Span(timing.links[-len(said) - 1].ended, links[-1].ended)
    events = [metadata("process_name", "launches", LAUNCHES)]
    events += [metadata("thread_name", "in turn", LAUNCHES, lane + 1) for lane in range(_LANES)]
    for number, (link, about) in enumerate(zip(links, said, strict=True)):
        events += _launch(link, number % _LANES + 1, about, span)
    slices = [each for each in timing.timeline.slices if _is_shown(each, span, clock)]
    events += _slices(slices, span, clock, timing.timeline.name)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def write(timing: ChainTiming, said: Sequence[dict[str, Any]], clock: float, path: Path) -> None:
    """Write the timeline to a file for the viewer."""
    events = layer_events(timing, said, clock)
    lines = ",\n".join(json.dumps(each) for each in events["traceEvents"])
    path.write_text(f'{{"displayTimeUnit": "ns", "traceEvents": [\n{lines}\n]}}\n')


def _launch(link: LinkTime, lane: int, about: dict[str, Any], span: Span) -> list[dict[str, Any]]:
    common = {"ph": "X", "pid": LAUNCHES, "tid": lane}
    found = []
    named = [(about["label"], link.opened, link.ended, about)]
    if link.begun > link.opened:
        named.append((WAIT, link.opened, link.begun, {}))
    for name, start, end, arguments in named:
        at, duration = span.within(start, end)
        if duration > 0:
            found.append(common | {"name": name, "ts": at, "dur": duration, "args": arguments})
    return found


def _is_shown(each: Slice, span: Span, clock: float) -> bool:
    cycles = clock * 1e3
    start, end = each.start / cycles, each.end / cycles
    return end > span.start and start < span.end and end - start >= SHORTEST


def _slices(slices: list[Slice], span: Span, clock: float, sm: str) -> list[dict[str, Any]]:
    """Tracks of an SM's units, and of each launch's warps on that SM."""
    events, tracks, processes = [], dict[str, tuple[int, int]](), dict[str, int]()
    for name in sorted({each.track for each in slices}, key=natural):
        label, _, _ = name.partition(": ")
        process = UNITS
        if "warp" in name:
            process = processes.setdefault(label, WARPS + len(processes))
        number = sum(1 for at in tracks.values() if at[0] == process) + 1
        tracks[name] = process, number
        events.append(metadata("thread_name", name.rpartition(": ")[2], process, number))
    names = {UNITS: f"units of {sm}"}
    names |= {number: f"warps on {sm}: {label}" for label, number in processes.items()}
    events += [metadata("process_name", name, number) for number, name in names.items()]
    for number, each in enumerate(slices):
        process, thread = tracks[each.track]
        at, duration = span.within(each.start / (clock * 1e3), each.end / (clock * 1e3))
        common = {"name": each.name, "cat": "sm", "pid": process, "tid": thread, "ts": at}
        if each.overlaps:
            events.append(common | {"ph": "b", "id": number})
            events.append(common | {"ph": "e", "id": number, "ts": round(at + duration, 3)})
        else:
            events.append(common | {"ph": "X", "dur": duration})
    return events
