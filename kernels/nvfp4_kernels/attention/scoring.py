"""Scoring: the logit of a query and a key, and the keys that a query sees."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scoring:
    """Scale, soft cap and mask that turn ``q · k`` into a logit.

    Attributes:
        scale: factor of ``q · k``.
        causal: whether keys after the query's position are masked.
        window: number of keys that a query sees, its own included; None: all.
        soft_cap: ``c`` of ``c · tanh(logit / c)``, applied to the scaled product; None: no cap.
        batch_invariant: whether a row's result depends, to the bit, on its query and keys alone:
            not on the other rows of the call, their number or their order.
    """

    scale: float
    causal: bool
    window: int | None = None
    soft_cap: float | None = None
    batch_invariant: bool = False

    @property
    def window_keys(self) -> int:
        """Window as passed to kernels: 0 for none, clamped to int32, the type of all lengths."""
        return min(self.window or 0, 2**31 - 1)
