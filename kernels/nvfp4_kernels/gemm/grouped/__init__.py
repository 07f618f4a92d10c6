"""D[t] = alpha[e] · A[t] · B[e]ᵀ for token tile t of expert e, with NVFP4 weights."""
