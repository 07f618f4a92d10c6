"""Scores whose best are chosen where they arise: a consumer of the scoring kernel on sm_100.

Each query's candidates are in shared memory, as keys that order them. A score joins them if it
exceeds the last of the best that are known; when they become too many, the best stay, and the bound
rises. Where the keys of a query are split among CTAs, each writes its best, and ``TopK`` chooses.
"""
