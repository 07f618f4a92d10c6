"""PTX parser, basic blocks, and the analysis of uniformity across a warp."""
