"""Settings of the garbage collector that avoid repeated scans of long-lived objects."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests import startup

# Imports, kernel traces and emulated threads make many objects and hardly any garbage: with
# Python's own thresholds (700, 10, 10) a fifth of all time goes into collections.
THRESHOLDS = (100_000, 20, 100)


def collect_seldom() -> None:
    """Make the collector run less often, in this process and in every child process."""
    gc.set_threshold(*THRESHOLDS)
    os.environ["COLLECTION_THRESHOLDS"] = ",".join(map(str, THRESHOLDS))
    os.environ["PYTHONPATH"] = startup.path()


@contextmanager
def paused() -> Iterator[None]:
    """Pause garbage collection in this context; collect afterwards.

    Some of vLLM's models recurse deeply while they are built: a finalizer that the collector calls
    then finds no stack left, and pytest fails the test.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect(1)


@contextmanager
def set_aside() -> Iterator[None]:
    """Exclude all existing objects from collections in this context; collect once at the end.

    An engine collects a dozen times, and undoes any ``gc.freeze()`` when it ends: in a process with
    torch, vLLM and earlier tests, the collections take longer than everything else.
    """
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        # Objects that vLLM itself would freeze must be freed with its engine.
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        try:
            yield
        finally:
            gc.collect()
    gc.unfreeze()
