"""Accuracy of a model's quantised variants beside its 16-bit checkpoint, served by vLLM."""
