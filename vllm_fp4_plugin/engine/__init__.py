"""Hooks into vLLM's engine: platform, worker, startup checks, refusals, models for reports."""
