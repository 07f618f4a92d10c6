"""Non-NVFP4 layers of a mixed-precision checkpoint: served by vLLM's methods or by references."""
