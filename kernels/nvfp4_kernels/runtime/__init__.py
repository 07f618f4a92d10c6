"""Compilation and launch of kernels: trace, compile, cache, load, record, replay."""
