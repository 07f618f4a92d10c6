"""Fusions in vLLM's models: checks that allow each, and the modules that replace vLLM's."""
