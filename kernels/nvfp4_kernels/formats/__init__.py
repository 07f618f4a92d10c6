"""NVFP4 as stored and laid out: values, scales, fragments, terms."""
