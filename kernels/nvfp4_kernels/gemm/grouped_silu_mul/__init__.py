"""C[t] = f(alpha[e, 0] · A[t] · B[e, 0]ᵀ) · (alpha[e, 1] · A[t] · B[e, 1]ᵀ), tile t of expert e."""
