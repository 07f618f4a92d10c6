"""A server under load for a long time: verdicts on its requests, answers and memory."""
