"""Scaled-down models of every architecture in vLLM's registry: their configs, and vLLM's models."""
