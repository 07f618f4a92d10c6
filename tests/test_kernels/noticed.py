"""What a test says of a kernel with a mistake in it."""

from collections.abc import Callable

from tests.emulator import EmulatorError

WRONG, NOTHING = "wrong numbers", "nothing"


def noticed(check: Callable[[], object]) -> str:
    """The class of the emulator's finding, ``WRONG`` where ``check`` asserts, or ``NOTHING``."""
    try:
        check()
    except AssertionError:
        return WRONG
    except EmulatorError as finding:
        return type(finding).__name__
    return NOTHING
