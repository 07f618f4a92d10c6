"""Tensor memory accelerator: tensor maps, tile copies, swizzles, bulk copies and reductions."""
