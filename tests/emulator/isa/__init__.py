"""What each lane-wise PTX instruction computes, and nothing about warps, memory or time."""
