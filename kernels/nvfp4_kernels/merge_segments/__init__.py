"""One result from those of attention over parts of the keys."""

from nvfp4_kernels.merge_segments.op import merge_segments

__all__ = ["merge_segments"]
