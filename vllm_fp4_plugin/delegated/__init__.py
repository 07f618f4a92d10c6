"""Non-NVFP4 layers of mixed-precision checkpoints, run by vLLM or reference implementations."""
