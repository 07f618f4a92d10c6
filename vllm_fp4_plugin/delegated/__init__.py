"""Layers of a checkpoint of mixed precision that are not NVFP4: vLLM's methods, and references."""
