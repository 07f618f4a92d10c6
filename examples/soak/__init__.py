"""Soak test of a server: verdicts on its requests, answers and memory under a long load."""
