"""Unpermute (finalize): weighted sums of each token's expert outputs."""
