"""Quantised mixtures of experts, served by our kernels or, where unsupported, vLLM's methods.

``choice.choose`` selects the method of a layer.
"""
