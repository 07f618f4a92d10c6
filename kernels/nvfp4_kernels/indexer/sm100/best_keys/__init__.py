"""Fused top-k of scores: a visitor of the scoring kernel's epilogue on sm_100.

Each query's candidates are in shared memory, as sort keys. A score is appended if it exceeds the
query's threshold; when the buffer fills up, the best ``top_k`` are kept, and the threshold rises.
If the keys of a query are split among CTAs, each CTA writes its top-k, and ``IndexerTopk`` selects
from these.
"""
