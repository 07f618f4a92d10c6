"""NVFP4 format: quantisation, scale layouts, MMA fragments, and sums of NVFP4 terms."""
