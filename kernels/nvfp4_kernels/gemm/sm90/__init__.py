"""Weight-only GEMM of sm_90: 16-bit activations, NVFP4 weights dequantised in registers."""
