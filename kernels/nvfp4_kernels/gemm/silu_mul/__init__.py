"""C = silu(alpha1 · A · B1ᵀ) · (alpha2 · A · B2ᵀ) with NVFP4 weights."""
