"""Timeline of one SM, for display."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Slice(NamedTuple):
    """Work that took time on a track.

    Attributes:
        track: warp or unit.
        name: kind of work.
        start, end: cycles.
        overlaps: whether other slices of the track may run at the same time.
    """

    track: str
    name: str
    start: float
    end: float
    overlaps: bool = False


@dataclass
class Timeline:
    """Slices of one SM.

    Attributes:
        name: name of the SM.
        slices: slices in the order of recording.
    """

    name: str
    slices: list[Slice] = field(default_factory=list)
    _latest: dict[str, int] = field(default_factory=dict)

    def add(self, track: str, name: str, start: float, end: float, overlaps: bool = False) -> None:
        """Add a slice; merge a slice that continues the track's last slice of the same name."""
        if end <= start:
            return
        if not overlaps:
            at = self._latest.get(track)
            if at is not None:
                last = self.slices[at]
                if last.name == name and start - last.end < 1e-6:
                    self.slices[at] = last._replace(end=end)
                    return
            self._latest[track] = len(self.slices)
        self.slices.append(Slice(track, name, start, end, overlaps))
