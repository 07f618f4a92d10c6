"""The kernel benchmark: our products beside cuBLAS and Marlin, at a model's layer shapes."""
