"""The catalogue: NVFP4 checkpoints that people serve, family by family, in miniature.

``dense.py`` and ``experts.py`` hold what is known of each family, ``checkpoint.py`` makes a tiny
checkpoint with exactly its config, names, dtypes and shapes divided, ``reference.py`` what
transformers says of one, ``plan.py`` plans it for a device, and ``python -m tests.catalogue``
writes what came of it where ``python -m vllm_fp4_plugin catalogue`` prints it from.
"""
