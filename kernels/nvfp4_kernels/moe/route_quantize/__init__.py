"""Routing and quantisation (or copy) of a small batch in one launch."""
