"""Commands of ``python -m vllm_fp4_plugin``, and tables that only these commands print."""
