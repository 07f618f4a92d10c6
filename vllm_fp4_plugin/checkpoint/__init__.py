"""Checkpoints: files, quantization schemes of layers, and checks that a load is complete."""
