"""Top-k of scores where they arise: a visitor of the scoring kernel's epilogue on sm_100.

Each query's candidates are in shared memory, as sort keys. A score is appended if it exceeds the
query's threshold; when the buffer fills up, the best ``top_k`` are kept, and the threshold rises.
Where the keys of a query are split among CTAs, each writes its best, and ``IndexerTopk`` chooses.
"""
