"""The kernel of ``moe_topk`` on sm_90 and sm_100, and its launch."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.checks import check_layout
from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.devices import dtype_name
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.moe.topk.choice import LOGITS_ALIGNMENT, WARP, RouterLogits, TokenChoice
from nvfp4_kernels.moe.topk.op import new_topk
from nvfp4_kernels.runtime.compile import launch

WARPS = 4  # of a CTA, a token each


class TopkOut(NamedTuple):
    """Result of the top-k, slots of all tokens; part of kernels' arguments.

    Attributes:
        weights: float32 [tokens, top_k].
        ids: int32 [tokens, top_k].
    """

    weights: cute.Pointer
    ids: cute.Pointer


class TopkArguments(NamedTuple):
    """Arguments of a launch."""

    given: RouterLogits
    out: TopkOut


@dataclass(frozen=True)
class MoeTopk:
    """Router top-k with a warp per token.

    Attributes:
        choice: top-k of a token's experts.
    """

    choice: TokenChoice

    def signature(self) -> tuple[TopkArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        types = {**self.choice.types(), "weights": Float32, "ids": Int32}
        alignment = LOGITS_ALIGNMENT | {"weights": 4, "ids": 4}
        return (example(TopkArguments, types, alignment),)

    @cute.jit
    def __call__(self, arguments: TopkArguments, stream: cuda_driver.CUstream) -> None:
        """Launch a warp for each token."""
        self.kernel(arguments).launch(
            grid=(cute.ceil_div(arguments.given.tokens, WARPS), 1, 1),
            block=(WARPS * WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: TopkArguments) -> None:
        """Select the experts of this warp's token, and write ids and weights."""
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        thread = cute.arch.thread_idx()[0]
        token = cute.arch.block_idx()[0] * WARPS + thread // WARP
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        if token < arguments.given.tokens:
            self._write(arguments, token, thread % WARP)

    @cute.jit
    def _write(self, arguments: TopkArguments, token: Int32, lane: Int32) -> None:
        chosen = self.choice.choose(arguments.given, token, lane)
        weight = self.choice.weigh(arguments.given, token, lane, chosen)
        top_k = self.choice.router.top_k
        if lane < top_k:
            slot = Int64(token) * top_k + lane
            Array(arguments.out.ids, shape=(1,)).store(chosen.id, slot)
            Array(arguments.out.weights, shape=(1,)).store(weight, slot)


def check_logits(logits: Tensor, bias: Tensor | None, padding: Tensor | None) -> None:
    """Raise unless kernels can read the logits, the bias and the padding."""
    for name, tensor in (("logits", logits), ("bias", bias)):
        check_layout(name, tensor)
    if padding is not None and padding.stride(-1) != 1:
        check_layout("padding", padding)


def choice_of(logits: Tensor, bias: Tensor | None, router: Router) -> TokenChoice:
    """Compile-time configuration of the top-k."""
    return TokenChoice(dtype_name(logits.dtype), logits.shape[1], router, bias is not None)


def moe_topk(
    logits: Tensor, bias: Tensor | None, padding: Tensor | None, router: Router
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.moe.topk.op.moe_topk``.

    Raises:
        InvalidArgument: a tensor is misaligned or not contiguous.
    """
    check_logits(logits, bias, padding)
    weights, ids = new_topk(logits, router.top_k)
    if len(logits):
        given = RouterLogits(logits, bias, padding, len(logits))
        kernel = MoeTopk(choice_of(logits, bias, router))
        launch(kernel, TopkArguments(given, TopkOut(weights, ids)))
    return weights, ids
