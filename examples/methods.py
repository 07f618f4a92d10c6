"""Names in vLLM of the ways to serve a model that examples compare."""

# For ``--quantization``; ModelOpt's NVFP4 has a separate name there.
METHODS = {
    "bf16": None,
    "nvfp4-tc": "nvfp4-tc",
    "modelopt": "modelopt_fp4",
    "compressed-tensors": "compressed-tensors",
}
