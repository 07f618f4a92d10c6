"""vLLM's attention on our kernels: ``--attention-backend CUSTOM``.

``impl`` has ``paged_attention`` throughout; ``hopper`` ``decode_attention`` and FlashAttention 3.
"""
