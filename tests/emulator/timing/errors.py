"""Errors of the timing model."""


class TimingError(Exception):
    """Error for a trace that cannot be replayed, or for an instruction without a cost."""
