"""Deviation of a model with quantised layers from the 16-bit model."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from examples.log_probabilities import log_probabilities, of_next_tokens
from examples.perplexity import Interval, log_perplexity_difference, mean_interval
from examples.sensitivity.subject import Subject

Quantised = Callable[[Sequence[str]], AbstractContextManager[None]]


@dataclass(frozen=True)
class Deviation:
    """Log-probabilities and divergence of a variant; float64 ``(windows, tokens - 1)`` each.

    Attributes:
        logprobs: natural log-probabilities of the actual next tokens.
        reference: log-probabilities of the same tokens under the 16-bit model.
        divergence: KL(16-bit ‖ variant) of the distributions of the next token, in nats.
    """

    logprobs: np.ndarray
    reference: np.ndarray
    divergence: np.ndarray

    def of_windows(self, chosen: slice) -> "Deviation":
        """Deviation restricted to the chosen windows."""
        return Deviation(self.logprobs[chosen], self.reference[chosen], self.divergence[chosen])

    @property
    def kl(self) -> Interval:
        """The mean divergence; the bootstrap interval draws whole windows."""
        return mean_interval(self.divergence.mean(axis=1))

    @property
    def log_perplexity(self) -> Interval:
        """Increase of the log-perplexity over the 16-bit model."""
        return log_perplexity_difference(self.logprobs, self.reference)


def measure(
    subject: Subject,
    quantised: Quantised,
    variants: Mapping[str, Sequence[str]],
    windows_at_once: int,
    on_variant: Callable[[], None] = lambda: None,
) -> dict[str, Deviation]:
    """Run every window through the 16-bit model and through each of its variants.

    The run needs memory for two distributions, ``windows_at_once · tokens · vocabulary · 4`` bytes
    each.

    Args:
        subject: model and windows.
        quantised: function that returns a context in which the given linears are quantised.
        variants: quantised linears of each variant, by name.
        windows_at_once: number of windows in one batch.
        on_variant: called after each variant of each batch.
    """
    parts: dict[str, list[tuple[np.ndarray, ...]]] = {name: [] for name in variants}
    for batch in subject.windows.split(windows_at_once):
        expected = log_probabilities(subject.model, batch)
        reference = of_next_tokens(expected, batch)
        for name, linears in variants.items():
            with quantised(linears):
                found = log_probabilities(subject.model, batch)
            parts[name].append((of_next_tokens(found, batch), reference, _kl(expected, found)))
            on_variant()
    return {
        name: Deviation(*(np.concatenate(part) for part in zip(*found, strict=True)))
        for name, found in parts.items()
    }


def _kl(expected: Tensor, found: Tensor) -> np.ndarray:
    terms = F.kl_div(found, expected, reduction="none", log_target=True)
    return terms.sum(-1).double().cpu().numpy()
