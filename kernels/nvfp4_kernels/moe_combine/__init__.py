"""Sums of what each token's experts gave."""

from nvfp4_kernels.moe_combine.op import moe_combine

__all__ = ["moe_combine"]
