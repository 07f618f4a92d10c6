"""Catalogue of the NVFP4 checkpoints that people serve, family by family, scaled down.

``dense.py`` and ``experts.py`` hold the known facts of each family, ``checkpoint.py`` makes a tiny
checkpoint with exactly the family's config, names and dtypes, but smaller shapes. ``reference.py``
computes transformers' log-probabilities, and ``plan.py`` plans the checkpoint for a device.
``python -m tests.catalogue`` writes the table that ``python -m vllm_fp4_plugin catalogue`` prints.
"""
