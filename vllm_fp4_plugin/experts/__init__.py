"""Quantised mixtures of experts: vLLM's own methods on a GPU, a reference in torch on CPU.

``choice.choose`` says which method serves a layer; kernels of ours would be one more answer of it.
"""
