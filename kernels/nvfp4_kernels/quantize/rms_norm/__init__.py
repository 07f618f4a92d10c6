"""RMSNorm, with or without the addition before it, to NVFP4 with blocked scales."""
