"""vLLM's CPU platform, with attention backends by name."""

from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_fp4_plugin.attention.errors import UnsupportedAttention


class Nvfp4CpuPlatform(CpuPlatform):
    """CPU platform that honours ``--attention-backend CUSTOM``."""

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum,
        attn_selector_config: Any,
        num_heads: int | None = None,
    ) -> str:
        """Path of the backend class; raises when CUSTOM is asked for and cannot serve a layer."""
        if selected_backend != AttentionBackendEnum.CUSTOM:
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        if not selected_backend.is_overridden():
            raise UnsupportedAttention(
                "attention-backend: is CUSTOM, but no backend is registered under that name; "
                "leave the option out to use CPU_ATTN"
            )
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise UnsupportedAttention(
                f"attention-backend: is CUSTOM, which cannot serve a layer: {'; '.join(reasons)}; "
                "serve with --attention-backend CPU_ATTN"
            )
        return str(selected_backend.get_path())
