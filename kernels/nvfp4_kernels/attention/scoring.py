"""How a query scores a key, and which keys it sees."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scoring:
    """From ``q · k`` to a logit, and which keys a query sees.

    Attributes:
        scale: factor of ``q · k``.
        causal: no key after the query's position.
        window: keys that a query sees, its own included; None: all.
        soft_cap: ``c`` of ``c · tanh(logit / c)``, applied to the scaled product; None: no cap.
    """

    scale: float
    causal: bool
    window: int | None = None
    soft_cap: float | None = None

    @property
    def window_keys(self) -> int:
        """The window as kernels take it, 0 for none: an int32, which no sequence is longer than."""
        return min(self.window or 0, 2**31 - 1)
