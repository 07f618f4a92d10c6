"""Slots of a mixture of experts sorted into token tiles."""

from nvfp4_kernels.moe_route.op import moe_route

__all__ = ["moe_route"]
