"""PTX text: parsed, cut into basic blocks, and analysed for what is uniform across a warp."""
