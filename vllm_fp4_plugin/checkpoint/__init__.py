"""A local checkpoint: files, quantization scheme of each layer, completeness of a load."""
