"""The indices of the largest values of long rows: one source for sm_90 and sm_100.

A cluster of CTAs takes a row, each a slice of its columns, and reads it once. A sample of the row
says what value is likely exceeded by a few more elements than are wanted; those that exceed it go
to shared memory, where the exact best are selected. If the sample misled, the row is read again.
"""
