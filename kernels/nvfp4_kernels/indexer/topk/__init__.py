"""Exact top-k of long rows: one source for sm_90 and sm_100.

A cluster of CTAs processes a row and reads it once, each CTA a slice of the columns. A sample of
the row gives a threshold that slightly more than ``top_k`` elements are likely to exceed; these
candidates go to shared memory, where the exact top-k is selected. If there are too few candidates,
the row is read again.
"""
