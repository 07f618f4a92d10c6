"""silu(gate) · up, to NVFP4 with blocked scales or to E4M3."""
