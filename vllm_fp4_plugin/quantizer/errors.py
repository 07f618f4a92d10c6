"""Exception of the quantiser."""


class QuantizerError(ValueError):
    """Error for an argument, source or destination that is not accepted; no copy is written."""
