"""Checks of an op under ``torch.compile``."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

Call = tuple[tuple[Any, ...], dict[str, Any]]

# opcheck's test_schema compares inputs with torch.allclose, which does not support float8.
_OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def check_op(op: Any, args: tuple[Any, ...]) -> None:
    """Check that the fake kernel agrees with the real one, for static and dynamic shapes."""
    torch.library.opcheck(op, args, test_utils=_OPCHECKS)


def check_compiled(
    function: Callable[..., Any], calls: Iterable[Call], graphs: int, fewer: int = 0
) -> None:
    """Check that a function compiles to ``graphs`` whole graphs and equals eager mode bit for bit.

    ``fewer``: number of recompilations that only some versions of torch need.
    """
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for args, kwargs in calls:
        for ours, eager in zip(
            _tensors(compiled(*args, **kwargs)), _tensors(function(*args, **kwargs)), strict=True
        ):
            assert ours.dtype == eager.dtype
            assert torch.equal(ours.view(torch.uint8), eager.view(torch.uint8))
    assert graphs - fewer <= counter.frame_count <= graphs


def _tensors(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result
