"""Files that belong to other users, and access as another user; needs root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NOBODY = 65534


def needs_root() -> None:
    """Skip a test if files cannot be given to another user."""
    if os.geteuid() != 0:
        pytest.skip("needs root, who can give files to another user")


@contextmanager
def acting_as(user: int) -> Iterator[None]:
    """Context in which this process has the effective user id ``user``."""
    needs_root()
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
