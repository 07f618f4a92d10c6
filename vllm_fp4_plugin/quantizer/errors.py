"""Exception of the quantiser."""


class QuantizerError(ValueError):
    """Error of an input that is not accepted; nothing is left at the destination."""
