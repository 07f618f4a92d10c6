"""Device that this process's vLLM runs on."""

import torch
from vllm.platforms import current_platform


def current_device() -> torch.device:
    """Device of vLLM's platform, for which kernel tables are asked."""
    return torch.device(current_platform.device_type)
