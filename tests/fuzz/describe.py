"""One-line description of arguments."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def described(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_value(x)}" for name, x in given.items())


def _value(x: Any) -> str:
    if isinstance(x, Tensor):
        dtype = str(x.dtype).removeprefix("torch.")
        where = "" if x.device.type == "cpu" else f" on {x.device.type}"
        if x.numel() == 1 and x.device.type == "cpu":
            return f"{dtype}{list(x.shape)} {x.item():.6g}{where}"
        dense = torch.empty(x.shape, device="meta").stride() if x.numel() else x.stride()
        strides = "" if x.stride() == dense else f" strides {list(x.stride())}"
        return f"{dtype}{list(x.shape)}{strides}{where}"
    if isinstance(x, tuple) and hasattr(x, "_asdict"):
        return f"{type(x).__name__}({described(x._asdict())})"
    if isinstance(x, tuple):
        return f"({', '.join(map(_value, x))})"
    return repr(x) if not isinstance(x, float) else f"{x:.6g}"
