"""Offline throughput of a model through vLLM, compared between quantization methods."""
