"""Scaled-down models of every architecture in vLLM's registry: configs, and vLLM's models."""
