"""What can go wrong."""


class TimingError(Exception):
    """A trace that cannot be replayed, or an instruction that has no price."""
