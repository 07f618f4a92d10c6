"""Calls that ``gemm`` and ``gemv`` refuse, and the messages."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import CustomOpDef

from nvfp4_kernels import InvalidArgument, NoKernelError
from tests.test_kernels.gemm.linear_cases import Case, LinearOp, grid_problem

_GOOD = Case(5, 130, 96, shards=(100, 30), batch=(2,), batched_weight=True)
_E4M3 = torch.float8_e4m3fn

# Changed arguments of a valid call -> the message.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "b is signed": (
        {"b": torch.zeros(130, 48, dtype=torch.int8)},
        "b: dtype is int8, must be uint8",
    ),
    "b is 1-D": (
        {"b": torch.zeros(48, dtype=torch.uint8)},
        r"b: shape is \(48,\), must be \(\.\.\., rows, K/2\); unsqueeze it",
    ),
    "b ends in half a block": (
        {"b": torch.zeros(130, 44, dtype=torch.uint8)},
        "b: K is 88, must be a multiple of 16; pad K with zeros",
    ),
    "b_scales are bytes": (
        {"b_scales": torch.zeros(2, 2, 2, 32, 16, dtype=torch.uint8)},
        r"b: is in fragments \(uint8 b_scales\), must be blocked for NVFP4 activations",
    ),
    "b_scales are signed": (
        {"b_scales": torch.zeros(2, 2, 2, 32, 16, dtype=torch.int8)},
        "b_scales: dtype is int8, must be float8_e4m3fn",
    ),
    "b_scales are linear": (
        {"b_scales": torch.zeros(2, 130, 6).to(_E4M3)},
        r"b_scales: shape is \(2, 130, 6\), must be \(2, 2, 2, 32, 16\); .* with to_blocked",
    ),
    "a_scales are linear": (
        {"a_scales": torch.zeros(2, 5, 6).to(_E4M3)},
        r"a_scales: shape is \(2, 5, 6\), must be \(2, 1, 2, 32, 16\); .* with to_blocked",
    ),
    "a has another K": (
        {
            "a": torch.zeros(2, 5, 32, dtype=torch.uint8),
            "a_scales": torch.zeros(2, 1, 1, 32, 16).to(_E4M3),
        },
        "a: K is 64, must be 96 as the weight's",
    ),
    "a is wide without scales": (
        {"a": torch.zeros(2, 5, 96), "a_scales": None},
        "a: dtype is float32, must be bfloat16, float16",
    ),
    "a is packed without scales": (
        {"a_scales": None},
        "a: dtype is uint8, must be bfloat16, float16",
    ),
    "a is 16-bit with scales": (
        {"a": torch.zeros(2, 5, 96, dtype=torch.bfloat16)},
        "a: dtype is bfloat16, must be uint8",
    ),
    "16-bit a has another K": (
        {"a": torch.zeros(2, 5, 80, dtype=torch.bfloat16), "a_scales": None},
        r"a: shape is \(2, 5, 80\), must be \(\.\.\., M, 96\) to match the weight's K",
    ),
    "16-bit a is 1-D": (
        {"a": torch.zeros(96, dtype=torch.bfloat16), "a_scales": None},
        r"a: shape is \(96,\), must be \(\.\.\., M, 96\)",
    ),
    "16-bit a has a row scale": (
        {
            "a": torch.zeros(2, 5, 96, dtype=torch.bfloat16),
            "a_scales": None,
            "row_scale": torch.ones(2, 5),
        },
        "row_scale: given with 16-bit activations",
    ),
    "a has another batch": (
        {
            "a": torch.zeros(3, 5, 48, dtype=torch.uint8),
            "a_scales": torch.zeros(3, 1, 2, 32, 16).to(_E4M3),
        },
        r"b: batch dimensions are \(2,\), must be none or \(3,\) as a's",
    ),
    "row_scale is double": (
        {"row_scale": torch.ones(2, 5, dtype=torch.float64)},
        "row_scale: dtype is float64, must be float32",
    ),
    "row_scale is a column": (
        {"row_scale": torch.ones(2, 5, 1)},
        r"row_scale: shape is \(2, 5, 1\), must be \(2, 5\); one global scale per row",
    ),
    "alpha is bf16": (
        {"alpha": torch.ones(2, dtype=torch.bfloat16)},
        "alpha: dtype is bfloat16, must be float32",
    ),
    "alpha is a scalar": (
        {"alpha": torch.tensor(1.0)},
        r"alpha: shape is \(\), must be \(2,\); one factor per shard",
    ),
    "an alpha is missing": (
        {"alpha": torch.ones(1)},
        r"alpha: shape is \(1,\), must be \(2,\); one factor per shard",
    ),
    "shards are too narrow": (
        {"shard_sizes": (100, 29)},
        r"shard_sizes: \[100, 29\] adds up to 129, must be widths that add up to N = 130",
    ),
    "a shard is negative": (
        {"shard_sizes": (-1, 131)},
        r"shard_sizes: \[-1, 131\] .* must be widths that add up to N = 130",
    ),
    "bias is double": (
        {"bias": torch.ones(130, dtype=torch.float64)},
        "bias: dtype is float64, must be bfloat16, float16, float32",
    ),
    "bias is a row": (
        {"bias": torch.ones(1, 130)},
        r"bias: shape is \(1, 130\), must be \(130,\); one value per output column",
    ),
    "out_dtype is float8": (
        {"out_dtype": _E4M3},
        "out_dtype: is torch.float8_e4m3fn, must be one of bfloat16, float16, float32",
    ),
}


EVERY_MISTAKE = pytest.mark.parametrize("what", REFUSED)


def check_refused(op: LinearOp, what: str) -> None:
    changes, message = REFUSED[what]
    args = {**grid_problem(_GOOD).args, **changes}
    with pytest.raises(InvalidArgument, match=message):
        op(**args)


def below_the_dispatcher(op: CustomOpDef, name: str) -> LinearOp:
    """Call the op's function by keyword: the dispatcher passes meta tensors to the fake kernel."""
    schema = getattr(torch.ops.nvfp4, name).default._schema
    return lambda **args: op._init_fn(*(args[argument.name] for argument in schema.arguments))


def check_devices(implementation: LinearOp) -> None:
    args = {"row_scale": None, "bias": None, **grid_problem(_GOOD).args}
    for name in ("a_scales", "b", "b_scales", "alpha"):
        elsewhere = {**args, name: args[name].to("meta")}
        with pytest.raises(InvalidArgument, match=f"{name}: is on meta, must be on cpu as a is"):
            implementation(**elsewhere)
    for name, shape in (("bias", (130,)), ("row_scale", (2, 5))):
        elsewhere = {**args, name: torch.ones(shape, device="meta")}
        with pytest.raises(InvalidArgument, match=f"{name}: is on meta, must be on cpu as a is"):
            implementation(**elsewhere)
    everything = {
        name: value.to("meta") if isinstance(value, Tensor) else value
        for name, value in args.items()
    }
    there_is = r"no w4a4 kernel for meta \(meta\); there is nvfp4_\w+/reference \(cpu\), "
    with pytest.raises(NoKernelError, match=there_is):
        implementation(**everything)
