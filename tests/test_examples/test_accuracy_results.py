"""Confidence intervals of a run's figures."""

import math

import pytest

from examples.accuracy.harness import TaskScore
from examples.accuracy.results import task_interval


def share(right: int, count: int) -> TaskScore:
    """Score in the harness's format, with the standard error of a mean of zeros and ones."""
    value = right / count
    return TaskScore("task", "acc", value, math.sqrt(value * (1 - value) / (count - 1)), count)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        (8, 10, 0.490, 0.943),
        (50, 100, 0.404, 0.596),
        (0, 60, 0.0, 0.060),  # none right of 60 does not say that none ever is
        (60, 60, 0.940, 1.0),
        (1, 60, 0.003, 0.089),
    ],
)
def test_shares_have_wilsons_interval(right: int, count: int, low: float, high: float) -> None:
    found = task_interval(share(right, count))
    assert found.estimate == right / count
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-4)


def test_other_means_have_their_standard_error() -> None:
    found = task_interval(TaskScore("task", "f1", 0.5, 0.1, 100))
    assert (found.low, found.high) == pytest.approx((0.304, 0.696))
    found = task_interval(TaskScore("task", "bleu", 3.5, 0.1, 100))
    assert (found.low, found.high) == pytest.approx((3.304, 3.696))


def test_without_an_error_it_has_no_width() -> None:
    found = task_interval(TaskScore("task", "bleu", 3.5, math.nan, 100))
    assert (found.low, found.high) == (3.5, 3.5)
