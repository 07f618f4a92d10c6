"""silu(gate) · up, to NVFP4 with blocked scales."""
