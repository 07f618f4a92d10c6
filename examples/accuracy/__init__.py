"""Accuracy of a model's quantised variants against its 16-bit checkpoint, served by vLLM."""
