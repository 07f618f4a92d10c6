"""The catalogue: NVFP4 checkpoints that people serve, family by family, in miniature.

``facts.py`` holds what is known of each family, ``checkpoint.py`` makes a tiny checkpoint with
exactly its config, names, dtypes and shapes divided, ``plan.py`` plans it for a device, and
``python -m tests.catalogue`` writes what came of it where ``report --catalogue`` prints it from.
"""
