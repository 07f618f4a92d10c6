"""The device that this process's vLLM runs on."""

import torch
from vllm.platforms import current_platform


def current_device() -> torch.device:
    """Device type of vLLM's platform, by which kernel tables are asked."""
    return torch.device(current_platform.device_type)
