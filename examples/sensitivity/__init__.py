"""Choose the layers that lose most in NVFP4, to be left in 16 bits."""
