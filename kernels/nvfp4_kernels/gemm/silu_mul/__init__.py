"""C = silu(alpha[0] · A · B1ᵀ) · (alpha[1] · A · B2ᵀ) with NVFP4 weights."""
