"""Kernel benchmark: our GEMMs against cuBLAS, Humming and Marlin, at the layers of a model."""
