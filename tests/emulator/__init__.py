"""Functional emulator of Blackwell and Hopper: runs compiled PTX on the CPU, with checks."""

from tests.emulator.findings import EmulatorError
from tests.emulator.machine.gpu import Gpu
from tests.emulator.machine.limits import B200, GB300, H200, Limits
from tests.emulator.machine.schedule import (
    ALL_LATE,
    COPIES_LATE,
    EAGER,
    STANDARD,
    TENSOR_LATE,
    Schedule,
    randomised,
)
from tests.emulator.machine.sm import Sharing

__all__ = [
    "ALL_LATE",
    "B200",
    "COPIES_LATE",
    "EAGER",
    "GB300",
    "H200",
    "STANDARD",
    "TENSOR_LATE",
    "EmulatorError",
    "Gpu",
    "Limits",
    "Schedule",
    "Sharing",
    "randomised",
]
