"""Commands of ``python -m vllm_fp4_plugin``, and modules for their reports, tables and errors."""
