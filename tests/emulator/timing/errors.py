"""Errors of the timing model."""


class TimingError(Exception):
    """A trace that cannot be replayed, or an instruction without a price."""
