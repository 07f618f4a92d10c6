"""Attention on sm_100: loads, two matrix products and a softmax, each by warps of its own."""
