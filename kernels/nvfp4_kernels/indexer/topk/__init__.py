"""Exact top-k of long rows: one source for sm_90 and sm_100.

A cluster of CTAs processes a row; each CTA reads a slice of the columns once. A sample of the row
gives a threshold that slightly more than ``top_k`` elements are likely to reach. These elements,
the candidates, go to shared memory, where the exact top-k is selected. If there are fewer than
``top_k`` candidates, the row is read again without a threshold.
"""
