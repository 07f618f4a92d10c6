"""Experts and weights of the tokens of a batch, from the router's logits."""

from nvfp4_kernels.moe_topk.op import moe_topk

__all__ = ["moe_topk"]
