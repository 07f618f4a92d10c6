"""Device that layers are built for: the process's own, a planned one, or none in particular."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.platforms import current_platform

from nvfp4_kernels.devices import standing_in

_PLANNED: list[str] = []
_FOR_NO_DEVICE: list[None] = []  # one entry per active ``for_no_device``


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


@contextmanager
def for_no_device() -> Iterator[None]:
    """Context in which layers are built to match a checkpoint's tensors, and never run."""
    _FOR_NO_DEVICE.append(None)
    try:
        yield
    finally:
        _FOR_NO_DEVICE.pop()


def is_for_no_device() -> bool:
    """Whether layers are built for no device in particular, see ``for_no_device``."""
    return bool(_FOR_NO_DEVICE)


def is_for_this_device() -> bool:
    """Whether layers are built for this process's device, also for a report on it.

    Otherwise features that this device, or vLLM's build for it, lacks refuse no layer.
    """
    return not _FOR_NO_DEVICE and all(arch == current_device().type for arch in _PLANNED)


def is_planned() -> bool:
    """Whether layers are built for a report on another device.

    If so, it is unknown which kernels vLLM would choose on that device, and which kernels vLLM's
    build for the device would contain.
    """
    return bool(_PLANNED)
