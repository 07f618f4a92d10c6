"""Kernel benchmark: our GEMMs against cuBLAS, Humming and Marlin, in a model's linear layers."""
