"""Self-check at startup: each kind of fused op and its unfused form run on random inputs.

The first proof that a fusion is valid is the model's source, see ``forward_analysis``; the second
is this run, before memory profiling, graph capture and compilation. An op whose result differs by
more than rounding is unfused, with a warning.
"""
