"""Quantised mixtures of experts: on kernels of ours or, where they do not serve, vLLM's methods.

``choice.choose`` says which method serves a layer.
"""
