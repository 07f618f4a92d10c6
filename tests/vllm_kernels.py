"""Check of vLLM's kernel library for this machine: each build of the library lacks some ops."""

import pytest
import torch


def skip_without(*ops: str) -> None:
    """Skip the test unless the library has all ``ops``."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    missing = [op for op in ops if not hasattr(torch.ops._C, op)]
    if missing:
        pytest.skip(f"vLLM's library for this machine lacks {', '.join(missing)}")
