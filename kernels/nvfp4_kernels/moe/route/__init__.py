"""Slots of a mixture of experts sorted by expert into padded token tiles (align)."""
