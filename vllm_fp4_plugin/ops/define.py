"""Helpers to define the plugin's custom ops, and to make their inputs readable by kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from nvfp4_kernels.runtime.launch_cache import Prepared
from nvfp4_kernels.runtime.recording import is_listened_to

ALIGNMENT = 32  # bytes: widest load of an input by a kernel's thread


def readable(x: Tensor) -> Tensor:
    """Return ``x``, or a copy if ``x`` is not contiguous or not aligned to ``ALIGNMENT`` bytes.

    MLA, for example, passes columns of a wider matrix.
    """
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def define(
    library: Library, name: str, schema: str, function: Callable[..., Any], returns: str = "Tensor"
) -> Callable[..., Any]:
    """Define an op of ``nvfp4_tc``.

    Args:
        library: library that owns the op.
        name: name of the op.
        schema: schema of the arguments; the first is a tensor.
        function: implementation on any device; launches are cached, see
            ``nvfp4_kernels.runtime.launch_cache``.
        returns: schema of the results.

    Returns:
        Callable that bypasses torch's dispatcher, unless a compiler or dispatch mode observes ops
            or the first argument is a tensor subclass.
    """
    prepared = Prepared(function)
    # Kernels launch on the device of their tensors, so one registration serves all devices.
    library.define(f"{name}({schema}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, prepared, "CompositeExplicitAutograd")
    op = getattr(torch.ops.nvfp4_tc, name).default

    def call(x: Tensor, *given: Any) -> Any:
        run = op if is_listened_to() or type(x) is not Tensor else prepared
        return run(x, *given)

    return call
