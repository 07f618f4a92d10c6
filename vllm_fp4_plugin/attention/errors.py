"""Error of attention that our kernels do not compute."""


class UnsupportedAttention(ValueError):
    """Attention that ``PagedAttentionBackend`` does not compute; another backend must."""
