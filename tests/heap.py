"""Objects that the garbage collector need not look at again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


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
