"""Block-scaled GEMM of sm_100: NVFP4 activations times NVFP4 weights, on tcgen05."""
