"""vLLM's attention on ``nvfp4_kernels.paged_attention``: ``--attention-backend CUSTOM``."""
