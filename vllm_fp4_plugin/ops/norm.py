"""Custom ops of norms that quantise for the next layer: flat arguments, as in ``ops.linear``."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.library import Library, register_fake

from nvfp4_kernels.device.rowwise.operands import new_operand, new_row_scale
from vllm_fp4_plugin.ops.define import define, function, readable

_LIBRARY = Library("nvfp4_tc", "FRAGMENT")

Op = Callable[..., tuple[Tensor, ...]]


def norm_op(kernel: str) -> Op:
    """Make the op that calls a kernel of ``rms_norm_quantize`` or of a sibling function.

    Args:
        kernel: name of the function, and of the op.

    Returns:
        Op of ``x`` ``(M, K)``, ``residual`` ``(M, K)`` if the function takes one, ``weight``
        ``(K,)``, ``eps``, ``global_scale`` ``()`` unless scales are per token, ``terms`` and the
        kernel's target. The results are those of the function, see
        ``nvfp4_kernels.rms_norm_quantize``.
    """
    return _OPS[kernel]


def _define(name: str) -> Op:
    adds, per_token = name.startswith("add_"), name.endswith("_per_token")
    residual, scale = ("Tensor residual, " * adds), ("Tensor global_scale, " * (not per_token))
    results = 2 + adds + per_token

    def run(x: Tensor, *given: Any) -> tuple[Tensor, ...]:
        *operands, target = given
        rows = (readable(x), *(map(readable, operands[:1]) if adds else ()))
        found: tuple[Tensor, ...] = function(target)(*rows, *operands[adds:])
        return found

    def fake(x: Tensor, *given: Any) -> tuple[Tensor, ...]:
        data_and_scales = new_operand(x, x.shape[-1], given[-2])
        rows = (new_row_scale(x),) if per_token else ()
        return (*data_and_scales, *rows, *((x.new_empty(x.shape),) if adds else ()))

    op = define(
        _LIBRARY,
        name,
        f"Tensor x, {residual}Tensor weight, float eps, {scale}int terms, str kernel",
        run,
        f"({', '.join(['Tensor'] * results)})",
    )
    register_fake(f"nvfp4_tc::{name}", fake, lib=_LIBRARY)
    return op


_OPS = {
    name: _define(name)
    for name in (
        "rms_norm_quantize",
        "rms_norm_quantize_per_token",
        "add_rms_norm_quantize",
        "add_rms_norm_quantize_per_token",
    )
}
