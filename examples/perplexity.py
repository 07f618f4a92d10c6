"""Held-out perplexity, with confidence intervals of means over windows of text."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95% confidence interval."""

    estimate: float
    low: float
    high: float


def choose_windows(tokens: np.ndarray, count: int, length: int) -> np.ndarray:
    """``count`` windows spread evenly over ``tokens``, without overlap: ``(count, length)``.

    Raises:
        ValueError: the windows do not fit.
    """
    if count * length > len(tokens):
        raise ValueError(
            f"windows: {count} of {length} tokens are {count * length}, there are {len(tokens)} "
            "held-out tokens; ask for fewer with --windows"
        )
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return np.stack([tokens[start : start + length] for start in starts])


def perplexity(logprobs: np.ndarray) -> float:
    """``exp`` of the mean negative natural log-probability, over all entries."""
    return float(np.exp(-logprobs.mean()))


def log_perplexity_difference(
    logprobs: np.ndarray, reference: np.ndarray, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Increase of the log-perplexity over a reference on the same windows.

    Args:
        logprobs: log-probabilities ``(windows, tokens)``.
        reference: the reference model's log-probabilities, same tokens and shape.
        resamples: bootstrap samples; whole windows are drawn, as the tokens of a window are
            dependent.
        seed: seed of the draws.

    Raises:
        ValueError: the shapes differ.
    """
    if logprobs.shape != reference.shape:
        raise ValueError(
            f"reference: shape is {reference.shape}, must be {logprobs.shape}, the shape of "
            "logprobs; measure both models on the same windows"
        )
    return mean_interval((reference - logprobs).mean(axis=1), resamples, seed)


def mean_interval(per_window: np.ndarray, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Mean of figures of equally long windows, ``(windows,)``, with its bootstrap interval."""
    draws = np.random.default_rng(seed).integers(len(per_window), size=(resamples, len(per_window)))
    low, high = np.quantile(per_window[draws].mean(axis=1), [0.025, 0.975])
    return Interval(float(per_window.mean()), float(low), float(high))
