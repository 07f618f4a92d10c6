"""Arithmetic of each layer: kernels, and the format and number of terms of its activations."""
