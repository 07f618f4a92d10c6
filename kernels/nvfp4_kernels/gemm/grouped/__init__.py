"""D[t] = alpha[e] · A[t] · B[e]ᵀ, token tile t of expert e; NVFP4 weights."""
