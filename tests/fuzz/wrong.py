"""Wrong arguments: one argument of a valid call is changed to an invalid value."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import nvfp4_kernels
from tests.fuzz.draw import Draw
from tests.fuzz.ops import Given


def names_argument(message: str, name: str) -> bool:
    """Whether a message has an argument's name as a word, or, for an activation, the op's name."""
    return re.search(rf"\b(act_)?{re.escape(name)}\b", message) is not None


def copied(given: Any) -> Any:
    """Copies of the arguments in separate memory, with the same strides."""
    if isinstance(given, Tensor):
        if given.device.type != "cpu":
            return given
        storage = given.untyped_storage().clone()
        return torch.empty(0, dtype=given.dtype).set_(
            storage, given.storage_offset(), given.shape, given.stride()
        )
    if isinstance(given, dict):
        return {name: copied(x) for name, x in given.items()}
    if isinstance(given, tuple):
        parts = [copied(x) for x in given]
        return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
    return given


def break_one(draw: Draw, given: Given) -> str:
    """Break one of the arguments in place; returns its name and the change."""
    names = [name for name, x in given.items() if x is not None]
    name = draw.one(*names)
    given[name], how = _broken_within(draw, name, given[name])
    return how


def _broken_within(draw: Draw, name: str, value: Any) -> tuple[Any, str]:
    """Break a value; if it has fields, usually break one of them instead, recursively."""
    if isinstance(value, tuple) and getattr(value, "_fields", ()) and draw.chance(0.8):
        part = draw.one(*(f for f in value._fields if getattr(value, f) is not None))
        broken, how = _broken_within(draw, f"{name}.{part}", getattr(value, part))
        return value._replace(**{part: broken}), how
    broken, how = _broken(draw, value)
    return broken, f"{name} {how}"


def _broken(draw: Draw, value: Any) -> tuple[Any, str]:
    if draw.chance(0.15):
        return draw.one((None, "is None"), ("text", "is a str"), ([], "is an empty list"))
    if isinstance(value, Tensor):
        indices = value.dtype in (torch.int32, torch.int64)
        how = _with_odd_contents if indices and draw.chance(0.4) else draw.one(*_TENSOR)
        return how(draw, value), how.__name__.strip("_").replace("_", " ")
    if isinstance(value, bool):
        return draw.one((2.5, "is 2.5"), (torch.zeros(2), "is a tensor"))
    if isinstance(value, int):
        changed = draw.one(-1, 0, value + 1, value - 1, -value, 1 << 20, 1 << 40, 2.5, True)
        return changed, f"is {changed!r}"
    if isinstance(value, float):
        changed = draw.one(float("nan"), float("inf"), -value, -1.0, 0.0, 1)
        return changed, f"is {changed!r}"
    if isinstance(value, torch.dtype):
        changed = draw.one(torch.int8, torch.float64, torch.uint8, torch.float8_e4m3fn)
        return changed, f"is {changed}"
    if isinstance(value, list | tuple) and value and isinstance(value[0], int):
        changed = draw.one(
            [*value[:-1], value[-1] + 1], [*value, 0], value[:-1], [value[0] + 8, -8, *value[1:]],
            [str(value[0])], 7,
        )  # fmt: skip
        return changed, f"is {changed}"
    return draw.one((7, "is 7"), (2.5, "is 2.5"), (torch.zeros(3), "is a tensor"))


# --- tensors --------------------------------------------------------------------------------------


def _of_another_dtype(draw: Draw, x: Tensor) -> Tensor:
    others = (
        torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64,
        torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    )  # fmt: skip
    dtype = draw.one(*(d for d in others if d != x.dtype))
    if x.dtype == torch.float8_e8m0fnu:
        return x.view(torch.uint8).to(torch.float32).to(dtype)
    return x.to(torch.float32).to(dtype) if x.dtype.is_floating_point else x.to(dtype)


def _with_one_dimension_more(draw: Draw, x: Tensor) -> Tensor:
    return x.unsqueeze(draw.number(0, x.ndim))


def _with_one_dimension_less(draw: Draw, x: Tensor) -> Tensor:
    if not x.ndim:
        return x.repeat(3)
    return x.select(draw.number(0, x.ndim - 1), 0) if x.numel() else x.flatten()


def _one_shorter(draw: Draw, x: Tensor) -> Tensor:
    dims = [d for d, size in enumerate(x.shape) if size]
    if not dims:
        return x.unsqueeze(0)
    dim = draw.one(*dims)
    return x.narrow(dim, 0, x.shape[dim] - 1)


def _one_longer(draw: Draw, x: Tensor) -> Tensor:
    if not x.ndim:
        return x.unsqueeze(0)
    dim = draw.number(0, x.ndim - 1)
    shape = list(x.shape)
    shape[dim] += 1
    more = torch.zeros(shape, dtype=x.dtype)
    more.narrow(dim, 0, x.shape[dim]).copy_(x)
    return more


def _halved(draw: Draw, x: Tensor) -> Tensor:
    if not x.ndim:
        return x.unsqueeze(0)
    dim = draw.number(0, x.ndim - 1)
    return x.narrow(dim, 0, x.shape[dim] // 2)


def _empty(draw: Draw, x: Tensor) -> Tensor:
    return x.new_empty((0,) * max(1, x.ndim))


def _strided(draw: Draw, x: Tensor) -> Tensor:
    """View of every other element of a wider tensor."""
    if not x.ndim:
        return x.unsqueeze(0)
    wider = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)
    wider[..., ::2] = x
    return wider[..., ::2]


def _transposed(draw: Draw, x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.ndim > 1 else _strided(draw, x)


def _misaligned(draw: Draw, x: Tensor) -> Tensor:
    """Copy of a tensor that starts one element past an aligned address."""
    moved = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    return moved.copy_(x)


def _on_no_device(draw: Draw, x: Tensor) -> Tensor:
    return x.to("meta")


def _an_array(draw: Draw, x: Tensor) -> np.ndarray:
    return x.float().numpy()


def _with_odd_contents(draw: Draw, x: Tensor) -> Tensor:
    """Copy of a tensor with one element far from its old value."""
    changed = copied(x)
    if not x.numel() or x.dtype == torch.bool:
        return x.unsqueeze(0)
    flat = [int(i) for i in np.unravel_index(draw.number(0, x.numel() - 1), x.shape)]
    if x.dtype == torch.float8_e8m0fnu:
        return changed.view(torch.uint8)
    if x.dtype.is_floating_point:
        changed[tuple(flat)] = draw.one(torch.nan, -1.0, 0.0)
    elif x.dtype in (torch.int32, torch.int64):
        changed[tuple(flat)] = draw.one(-1, -2, 1 << 30, int(x[tuple(flat)]) ^ 1)
    else:
        changed[tuple(flat)] = 255
    return changed


_TENSOR: tuple[Callable[[Draw, Tensor], Any], ...] = (
    _of_another_dtype, _of_another_dtype, _with_one_dimension_more, _with_one_dimension_less,
    _one_shorter, _one_longer, _halved, _empty, _strided, _transposed, _misaligned, _on_no_device,
    _an_array, _with_odd_contents, _with_odd_contents,
)  # fmt: skip


def parameters(name: str) -> list[str]:
    """Parameter names of an op."""
    return list(inspect.signature(getattr(nvfp4_kernels, name)).parameters)
