"""The kernel benchmark: our products beside cuBLAS, Humming and Marlin, at layers of a model."""
