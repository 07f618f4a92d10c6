"""Choice of the device that torch runs on."""

import torch


def choose_device(given: str | None) -> str:
    """``cuda`` or ``cpu``: the given device; for None, a GPU if there is one.

    Raises:
        ValueError: ``given`` is another device, or is ``cuda`` and there is no GPU.
    """
    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if given not in ("cuda", "cpu"):
        raise ValueError(f"device: is {given!r}, must be cuda or cpu")
    if given == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: is cuda, torch finds no GPU; give --device cpu")
    return given


def device_name(device: str) -> str:
    """Name of the GPU; ``cpu`` for a CPU."""
    return torch.cuda.get_device_name() if device == "cuda" else device
