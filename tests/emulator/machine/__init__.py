"""Model of the chip: grids, clusters, CTAs and warps, and the order of their execution."""
