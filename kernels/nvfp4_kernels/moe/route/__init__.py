"""Slots of a mixture of experts sorted into token tiles."""
