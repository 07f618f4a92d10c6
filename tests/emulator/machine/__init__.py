"""The chip: grids of clusters of CTAs of warps, and the order of their execution."""
