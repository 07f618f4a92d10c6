"""Quantization methods to compare, with their names in vLLM."""

# For ``--quantization``; ModelOpt's NVFP4 has a separate name there.
METHODS = {
    "bf16": None,
    "nvfp4-tc": "nvfp4-tc",
    "modelopt": "modelopt_fp4",
    "compressed-tensors": "compressed-tensors",
}
