"""The chip: grids of clusters of CTAs of warps, and the order in which they go on."""
