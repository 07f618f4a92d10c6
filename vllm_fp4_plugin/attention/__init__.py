"""vLLM's attention on our kernels: ``--attention-backend CUSTOM``.

``impl`` runs ``paged_attention`` for every step; ``hopper`` runs ``decode_attention`` and
FlashAttention 3.
"""
