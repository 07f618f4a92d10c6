"""Fused ops in vLLM's models: where each is allowed, and the modules that replace the model's."""
