"""Fused top-k of scores: a visitor of the scoring kernel's epilogue on sm_100.

Each query's candidates are in a buffer in shared memory, as sort keys. A score is appended if it
exceeds the query's threshold; when the buffer fills up, the best ``top_k`` are kept, and the
threshold rises. If the keys of a query are split among CTAs, each CTA writes the top-k of a split,
and the kernel ``IndexerTopk`` selects among these candidates.
"""
