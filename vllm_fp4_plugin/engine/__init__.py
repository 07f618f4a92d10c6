"""vLLM's engine around a model: platform, startup checks, refusals, models built for reports."""
