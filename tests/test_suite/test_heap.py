"""Thresholds of the garbage collector, in pytest and in its child processes."""

import gc
import subprocess
import sys
import weakref

from tests import heap


class Knot:
    """Object in a reference cycle, which only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_processes_have_the_same_thresholds() -> None:
    command = [sys.executable, "-c", "import gc; print(gc.get_threshold())"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert gc.get_threshold() == heap.THRESHOLDS
    assert shown.strip() == str(heap.THRESHOLDS)


def test_what_is_set_aside_stays_and_what_comes_later_goes() -> None:
    before = Knot()
    old = weakref.ref(before)
    del before
    with heap.set_aside():
        later = Knot()
        new = weakref.ref(later)
        gc.freeze()
        del later
        gc.unfreeze()
        gc.collect()
        assert new() is None
        assert old() is not None
    gc.collect()
    assert old() is None
