"""Perplexity and its interval, against direct computation."""

import math

import numpy as np
import pytest

from examples.perplexity import choose_windows, log_perplexity_difference, perplexity


def test_perplexity_of_known_probabilities():
    probabilities = np.array([[0.5, 0.25], [0.125, 1.0]])
    geometric_mean = (0.5 * 0.25 * 0.125 * 1.0) ** (1 / 4)
    assert perplexity(np.log(probabilities)) == pytest.approx(1 / geometric_mean, rel=1e-12)


def test_perplexity_of_a_uniform_model_is_its_vocabulary():
    assert perplexity(np.full((3, 7), -math.log(10_240))) == pytest.approx(10_240)


def test_difference_is_that_of_the_log_perplexities():
    draws = np.random.default_rng(1)
    reference = -draws.exponential(size=(16, 32))
    logprobs = reference - draws.uniform(0, 0.1, size=(16, 32))
    found = log_perplexity_difference(logprobs, reference)
    direct = math.log(perplexity(logprobs)) - math.log(perplexity(reference))
    assert found.estimate == pytest.approx(direct)
    assert 0 < found.low < found.estimate < found.high


def test_interval_has_the_width_of_the_mean_of_paired_windows():
    # Windows differ from one another far more than the models do: pairing must cancel that.
    draws = np.random.default_rng(2)
    reference = -draws.uniform(1, 9, size=(400, 1)) * np.ones((1, 8))
    logprobs = reference - draws.normal(0.1, 0.02, size=(400, 1))
    found = log_perplexity_difference(logprobs, reference)
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.02 / math.sqrt(400), rel=0.15)


def test_equal_models_do_not_differ():
    logprobs = -np.ones((4, 5))
    found = log_perplexity_difference(logprobs, logprobs.copy())
    assert (found.estimate, found.low, found.high) == (0, 0, 0)


def test_interval_is_the_same_again():
    logprobs = -np.random.default_rng(3).exponential(size=(8, 4))
    reference = np.zeros((8, 4))
    first = log_perplexity_difference(logprobs, reference)
    assert first == log_perplexity_difference(logprobs, reference)


def test_different_windows_are_refused():
    with pytest.raises(ValueError, match=r"reference: shape is \(2, 4\), must be \(2, 3\)"):
        log_perplexity_difference(np.zeros((2, 3)), np.zeros((2, 4)))


def test_windows_do_not_overlap_and_reach_both_ends():
    tokens = np.arange(100)
    windows = choose_windows(tokens, count=7, length=14)
    assert windows.shape == (7, 14)
    assert len(np.unique(windows)) == windows.size
    assert (windows[0, 0], windows[-1, -1]) == (0, 99)
    assert (np.diff(windows, axis=1) == 1).all()


def test_too_many_windows_are_refused():
    with pytest.raises(ValueError, match=r"4 of 3 tokens are 12, there are 11.*--windows"):
        choose_windows(np.arange(11), count=4, length=3)
