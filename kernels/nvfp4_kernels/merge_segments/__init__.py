"""Merge of attention results over disjoint segments of the keys."""

from nvfp4_kernels.merge_segments.op import merge_segments

__all__ = ["merge_segments"]
