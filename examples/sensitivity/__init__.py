"""Which layers of a model lose most in NVFP4, and which to leave in 16 bits."""
