"""Top-k of long rows, exactly: one source for sm_90 and sm_100.

A cluster of CTAs takes a row, each a slice of its columns, and reads it once. A sample of the row
gives a threshold that slightly more than ``top_k`` elements are likely to exceed; those that do
go to shared memory, where the exact best are selected. If they are too few, the row is read again.
"""
