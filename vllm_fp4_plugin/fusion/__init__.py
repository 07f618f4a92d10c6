"""Fusions in vLLM's models: checks of each fusion, and modules that replace vLLM's."""
