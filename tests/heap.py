"""Objects that the garbage collector need not look at again and again."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests import startup

# Imports, traces of kernels and emulated threads make many objects and next to no garbage: by
# Python's own (700, 10, 10) a fifth of all time goes into looking for it.
THRESHOLDS = (100_000, 20, 100)


def collect_seldom() -> None:
    """Let the collector run less often, here and in every process that is started from here."""
    gc.set_threshold(*THRESHOLDS)
    os.environ["COLLECTION_THRESHOLDS"] = ",".join(map(str, THRESHOLDS))
    os.environ["PYTHONPATH"] = startup.path()


@contextmanager
def set_aside() -> Iterator[None]:
    """Keep every object made so far out of the collections within; collect once in the end.

    An engine collects a dozen times, and takes back any ``gc.freeze()`` as it leaves: in a process
    with torch, vLLM and the tests before, that takes longer than all else it does.
    """
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        # What vLLM itself would freeze is to go when its engine does.
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        try:
            yield
        finally:
            gc.collect()
    gc.unfreeze()
