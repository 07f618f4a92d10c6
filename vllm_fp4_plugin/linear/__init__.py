"""Linear methods of ``nvfp4-tc``: for quantised checkpoints, and for quantization at load."""
