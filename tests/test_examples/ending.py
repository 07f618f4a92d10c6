"""How a command ended that was called as a function."""

import pytest


def refused(command, arguments):
    """Whether a command refuses its arguments, and says so by its status."""
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    return ended.value.code == 1
