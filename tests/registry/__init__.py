"""Miniature of every architecture in vLLM's registry: its config, and vLLM's model of it."""
