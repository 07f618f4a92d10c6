"""Attention on sm_100: warp-specialised loads, MMAs and softmax."""
