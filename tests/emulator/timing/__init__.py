"""Timing model of launches on a B200: a discrete-event replay of a functional run."""

from tests.emulator.timing.chain import ChainTiming, Link, chain
from tests.emulator.timing.errors import TimingError
from tests.emulator.timing.model import model
from tests.emulator.timing.opaque import OpaqueLink
from tests.emulator.timing.parameters import B200_TIMING, H200_TIMING, Parameters
from tests.emulator.timing.report import report, show
from tests.emulator.timing.result import Timing
from tests.emulator.timing.whole import SpeedOfLight, extrapolate, speed_of_light

__all__ = [
    "B200_TIMING",
    "H200_TIMING",
    "ChainTiming",
    "Link",
    "OpaqueLink",
    "Parameters",
    "SpeedOfLight",
    "Timing",
    "TimingError",
    "chain",
    "extrapolate",
    "model",
    "report",
    "show",
    "speed_of_light",
]
