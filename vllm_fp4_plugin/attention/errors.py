"""Error for attention that our kernels do not support."""


class UnsupportedAttention(ValueError):
    """Attention that ``PagedAttentionBackend`` does not support; use another backend."""
