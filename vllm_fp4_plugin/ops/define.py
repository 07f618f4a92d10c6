"""Definition of the plugin's custom ops, and how their bodies find kernels and read inputs."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from nvfp4_kernels.runtime.launch_cache import Prepared
from nvfp4_kernels.runtime.recording import is_listened_to

ALIGNMENT = 32  # bytes: the most that a kernel's thread loads of an input at once


def function(target: str) -> Callable[..., Any]:
    """Function of a ``Kernel.target``, ``"module:function"``, as its module has it now."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def readable(x: Tensor) -> Tensor:
    """Return ``x`` as kernels read it: a copy if it is columns of a wider matrix, as MLA's are."""
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def define(
    library: Library, name: str, schema: str, function: Callable[..., Any], returns: str = "Tensor"
) -> Callable[..., Any]:
    """Define an op of ``nvfp4_tc``.

    Args:
        library: that keeps it.
        name: the op's.
        schema: its arguments, the first one a tensor.
        function: on any device; its calls are prepared, see ``nvfp4_kernels.runtime.launch_cache``.
        returns: its results.

    Returns:
        The op as the plugin calls it: without torch's dispatcher where nobody listens.
    """
    prepared = Prepared(function)
    # Kernels launch on whatever device their tensors are on, so one registration serves all.
    library.define(f"{name}({schema}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, prepared, "CompositeExplicitAutograd")
    op = getattr(torch.ops.nvfp4_tc, name).default

    def call(x: Tensor, *given: Any) -> Any:
        run = op if is_listened_to() or type(x) is not Tensor else prepared
        return run(x, *given)

    return call
