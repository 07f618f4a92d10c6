"""Custom ops of norms that quantise for the next layer: flat arguments, as in ``ops.linear``."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.library import Library, register_fake

from nvfp4_kernels.dispatch import load_target
from nvfp4_kernels.quantize.rms_norm.arguments import FORMS, Form
from vllm_fp4_plugin.ops.define import define, readable

_LIBRARY = Library("nvfp4_tc", "FRAGMENT")

Op = Callable[..., Any]


def norm_op(kernel: str) -> Op:
    """Look up the op that calls a kernel of ``rms_norm_quantize`` or ``add_rms_norm_quantize``.

    Args:
        kernel: name of the form of the kernel's op, see ``Form.name``.

    Returns:
        Op that takes the arguments of ``Form.parameters``, x and residual as ``(M, K)``, then the
        kernel's target. See ``nvfp4_kernels.rms_norm_quantize`` for the results.
    """
    return _OPS[kernel]


def _define(form: Form) -> Op:
    def run(*given: Any) -> Tensor | tuple[Tensor, ...]:
        *arguments, target = given
        call = form.call(*arguments)
        residual = None if call.residual is None else readable(call.residual)
        found: tuple[Tensor, ...] = load_target(target)(
            call._replace(x=readable(call.x), residual=residual)
        )
        return form.returned(found)

    def fake(*given: Any) -> Tensor | tuple[Tensor, ...]:
        return form.fake(*given[:-1])

    op = define(_LIBRARY, form.name, f"{form.parameters}, str kernel", run, form.results)
    register_fake(f"nvfp4_tc::{form.name}", fake, lib=_LIBRARY)
    return op


_OPS = {form.name: _define(form) for form in FORMS}
