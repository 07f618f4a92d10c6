"""How long a launch would take on a B200: a discrete-event model replayed from a functional run."""

from tests.emulator.timing.model import TimingError, model
from tests.emulator.timing.parameters import B200_TIMING, Parameters
from tests.emulator.timing.result import Timing

__all__ = ["B200_TIMING", "Parameters", "Timing", "TimingError", "model"]
