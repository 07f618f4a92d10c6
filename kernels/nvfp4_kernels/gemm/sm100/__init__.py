"""The block-scaled GEMM of sm_100: NVFP4 activations and weights on tcgen05."""
