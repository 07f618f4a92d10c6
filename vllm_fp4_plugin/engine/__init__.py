"""vLLM's engine around a model: platform, start, refusals, and models built for reports."""
