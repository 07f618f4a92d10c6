"""The one exception users of the quantiser meet."""


class QuantizerError(ValueError):
    """An input the quantiser does not accept; nothing has been left at the destination."""
