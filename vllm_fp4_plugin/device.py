"""Device that this process's vLLM runs on, or that a report plans for."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.platforms import current_platform

from nvfp4_kernels.devices import standing_in

_PLANNED: list[str] = []


def current_device() -> torch.device:
    """Device of vLLM's platform, used for lookups in kernel tables."""
    return torch.device(current_platform.device_type)


@contextmanager
def planned_for(arch: str) -> Iterator[None]:
    """Context in which layers are built for a report on another device, and never run.

    Args:
        arch: architecture of the device, e.g. ``"sm_100"``; empty: this process's device.
    """
    if not arch:
        yield
        return
    _PLANNED.append(arch)
    try:
        with standing_in(current_device().type, arch):
            yield
    finally:
        _PLANNED.pop()


def is_planned() -> bool:
    """Whether layers are built for a report on another device.

    If so, it is unknown which kernels vLLM would choose on that device, and which kernels vLLM's
    build for the device would contain.
    """
    return bool(_PLANNED)
