"""RMSNorm, with or without residual addition, to NVFP4 with blocked scales or to E4M3."""
