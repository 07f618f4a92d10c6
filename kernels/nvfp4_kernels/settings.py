"""Settings and bounds that the command line's help mentions; imports no torch."""

CACHE_VARIABLE = "NVFP4_KERNELS_CACHE"  # folder of compiled kernels
MAX_TERMS = 4  # NVFP4 values that add up to one of an operand
