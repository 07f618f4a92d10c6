"""Fixture of a CPU whose attention has no FP8 cache."""

from typing import Any

import pytest


@pytest.fixture
def cpu_without_fp8_cache(monkeypatch: pytest.MonkeyPatch) -> str:
    """Message of vLLM's CPU attention that refuses FP8 caches, as without AVX-512 in vLLM 0.33."""
    from vllm.platforms.cpu import CpuPlatform

    choose = CpuPlatform.get_attn_backend_cls.__func__
    message = "--kv-cache-dtype fp8_e4m3: is not what this CPU has"

    def refuse_fp8(cls: Any, backend: Any, config: Any, num_heads: int | None = None) -> str:
        if (config.kv_cache_dtype or "").startswith("fp8"):
            raise ValueError(message)
        path: str = choose(cls, backend, config, num_heads)
        return path

    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", classmethod(refuse_fp8))
    return message
