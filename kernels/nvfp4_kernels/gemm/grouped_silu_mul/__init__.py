"""C[t] = f(alpha[e, 0] · A[t] · B[e, 0]ᵀ) · (alpha[e, 1] · A[t] · B[e, 1]ᵀ) with NVFP4 weights.

Token tile t belongs to expert e; f, bounds and the offset of up: see ``Activation``.
"""
