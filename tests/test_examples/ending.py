"""Exit status of a command that was called as a function."""

import pytest


def refused(command, arguments):
    """Whether a command refuses its arguments, and exits with the status for refusals."""
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    return ended.value.code == 1
