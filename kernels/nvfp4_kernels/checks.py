"""Argument checks; errors name the argument, its value, the accepted values and a remedy."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_kernels.devices import dtype_name
from nvfp4_kernels.runtime.recording import keep_unprepared

ALIGNMENT = 16  # bytes: alignment of vector loads and of tensor map strides


class InvalidArgument(ValueError):
    """Argument that an op or the NVFP4 format does not accept."""


def check_dtype(name: str, x: Tensor, accepted: Sequence[torch.dtype]) -> None:
    """Raise unless ``x`` is a tensor with an accepted dtype."""
    names = ", ".join(dtype_name(d) for d in accepted)
    if not isinstance(x, Tensor):
        raise InvalidArgument(
            f"{name}: is {type(x).__name__}, must be a tensor of {names}; make one of it"
        )
    if x.dtype not in accepted:
        came = dtype_name(x.dtype)
        raise InvalidArgument(f"{name}: dtype is {came}, must be {names}; convert it first")


def check_shape(name: str, x: Tensor, expected: Sequence[int], remedy: str) -> None:
    """Raise unless ``x.shape`` equals ``expected``; the message ends with ``remedy``."""
    if tuple(x.shape) != tuple(expected):
        raise InvalidArgument(
            f"{name}: shape is {tuple(x.shape)}, must be {tuple(expected)}; {remedy}"
        )


def check_blocks_of_16(name: str, shape: Sequence[int]) -> None:
    """Raise unless ``shape`` is at least 2-D and its last dimension a multiple of 16."""
    if len(shape) < 2:
        raise InvalidArgument(
            f"{name}: shape is {tuple(shape)}, must have at least 2 dimensions (..., rows, K); "
            "unsqueeze it"
        )
    if shape[-1] % 16:
        raise InvalidArgument(
            f"{name}: K is {shape[-1]}, must be a multiple of 16; pad K with zeros"
        )


def reads_contents(x: Tensor) -> bool:
    """Whether tensor contents may be checked: if ``x`` is on a CPU, as a GPU would synchronise.

    If so, the call is not prepared for replay: see ``runtime.launch_cache``.
    """
    on_cpu = x.device.type == "cpu"
    if on_cpu:
        keep_unprepared("contents are read")
    return on_cpu


def check_same_device(**tensors: Tensor | None) -> None:
    """Raise unless all ``tensors`` that are not None are on one device."""
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    first_name, first = next(iter(devices.items()))
    for name, device in devices.items():
        if device != first:
            raise InvalidArgument(
                f"{name}: is on {device}, must be on {first} as {first_name} is; move it there"
            )


def check_layout(name: str, x: Tensor | None) -> None:
    """Raise unless ``x`` is None, empty, or contiguous and 16-byte aligned, as kernels require."""
    if x is None or x.numel() == 0:
        return
    if not x.is_contiguous():
        raise InvalidArgument(
            f"{name}: strides are {x.stride()} for shape {tuple(x.shape)}, must be contiguous; "
            "call .contiguous()"
        )
    if x.data_ptr() % 16:
        raise InvalidArgument(
            f"{name}: starts {x.data_ptr() % 16} bytes after a multiple of 16, must start at one; "
            "call .clone()"
        )


def check_rows(arch: str, **tensors: Tensor) -> None:
    """Raise unless all rows of all ``tensors`` are 16-byte aligned, as ``arch`` requires."""
    for name, x in tensors.items():
        size = x.element_size()
        if x.data_ptr() % ALIGNMENT:
            raise InvalidArgument(
                f"{name}: starts {x.data_ptr() % ALIGNMENT} bytes after a multiple of {ALIGNMENT}, "
                "must start at one; call .clone()"
            )
        for dim, (count, stride) in enumerate(zip(x.shape[:-1], x.stride()[:-1], strict=True)):
            if count > 1 and stride * size % ALIGNMENT:
                raise InvalidArgument(
                    f"{name}: stride {dim} is {stride * size} bytes, must be a multiple of "
                    f"{ALIGNMENT} on {arch}; call .contiguous()"
                )


def strides_of(x: Tensor) -> tuple[int, ...]:
    """Strides of ``x`` in elements; for a dimension of size 1, the stride of a contiguous tensor.

    torch allows any stride, e.g. 0 or an odd number, in a dimension of size 1, where only index 0
    is used. Tensor maps refuse some of these strides, and alignment checks ignore them.
    """
    return tuple(
        stride if count > 1 else math.prod(x.shape[dim + 1 :])
        for dim, (count, stride) in enumerate(zip(x.shape, x.stride(), strict=True))
    )
