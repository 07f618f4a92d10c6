"""Offline throughput of a model through vLLM, with one quantization method beside another."""
