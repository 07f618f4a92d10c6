"""A server under load for a long time: what becomes of its requests, answers and memory."""
