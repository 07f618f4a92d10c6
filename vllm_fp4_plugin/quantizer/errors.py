"""Exception of the quantiser."""


class QuantizerError(ValueError):
    """Error for an input that is not accepted; nothing is left at the destination."""
