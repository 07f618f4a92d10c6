"""PTX text: parsed, cut into basic blocks, and analysed for uniformity across a warp."""
