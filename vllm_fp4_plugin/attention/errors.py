"""Error for attention that our kernels do not support."""


class UnsupportedAttention(ValueError):
    """Error for attention that ``PagedAttentionBackend`` does not support."""
