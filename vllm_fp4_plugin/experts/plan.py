"""Plan of a layer of experts: its kernels, chosen once, when the layer is built."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from vllm.platforms import current_platform

from nvfp4_kernels.activation import GATED, UNGATED, Activation
from nvfp4_kernels.devices import device_family
from nvfp4_kernels.dispatch import Kernel, WeightLayout
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from nvfp4_kernels.gemm.grouped.kernels import KERNELS as GROUPED_GEMM
from nvfp4_kernels.gemm.grouped_silu_mul.kernels import KERNELS as GROUPED_SILU_MUL_GEMM
from nvfp4_kernels.moe.combine.kernels import KERNELS as MOE_COMBINE
from nvfp4_kernels.moe.dispatch.kernels import KERNELS as MOE_DISPATCH
from nvfp4_kernels.precompile.experts_layer import Choice
from vllm_fp4_plugin.arithmetic.choice import arithmetic_of, choose_kernels
from vllm_fp4_plugin.arithmetic.requested_terms import RequestedTerms
from vllm_fp4_plugin.device import current_device
from vllm_fp4_plugin.options import Activation as Inputs
from vllm_fp4_plugin.options import RequestedActivation

GATED_NAMES = (*GATED, "swigluoai")  # vLLM's names of our activations
_ENTRIES = {"static": MOE_DISPATCH, "per-token": MOE_DISPATCH}  # align tokens to tiles
_NO_MUL = "_no_mul"
# vLLM's kernels of these activations accept only these constants. Interleaved gate and up are
# separated at load, see ``stacks``.
_OF_ONE_MODEL = {
    "swigluoai": Activation("swigluoai_uninterleave", 7.0, 1.702, 1.0),
    "swiglustep": Activation("swiglustep", 7.0),
}
# The all-to-all backend for data-parallel ranks: others need kernels and layouts of their own.
ALL2ALL = "allgather_reducescatter"


@dataclass(frozen=True)
class ExpertsPlan:
    """Plan of a layer of experts; made when the layer is built, before weights are loaded.

    Attributes:
        enter: dispatch kernel, which sorts slots into token tiles (padded expert blocks), permutes
            tokens and, unless inputs are 16-bit, quantises them.
        first: gemm1 kernel, with the activation.
        between: requantize kernel for the result of gemm1; None if gemm1 quantises its own result,
            or the result stays in 16 bits.
        second: gemm2 kernel.
        combine: unpermute kernel, which sums each token's slots.
        inputs: quantization of the inputs of both GEMMs.
        terms: number of NVFP4 values whose sum represents each input element; 1 for 16-bit inputs.
        gated: whether experts have gate and up projections, which ``first`` computes together.
        activation: activation between the GEMMs.
        choice: top-k choice of experts that ``enter`` makes from the router's logits; None: vLLM
            chooses.
        reason: reason for an unexpected choice of kernels; may be empty.
    """

    enter: Kernel
    first: Kernel
    between: Kernel | None
    second: Kernel
    combine: Kernel
    inputs: Inputs
    terms: int
    gated: bool
    activation: Activation
    choice: Choice | None
    reason: str

    @property
    def targets(self) -> list[str]:
        """Targets of the kernels in the order of a forward pass; "" for a missing kernel."""
        kernels = (self.enter, self.first, self.between, self.second, self.combine)
        return ["" if kernel is None else kernel.target for kernel in kernels]

    @property
    def arithmetic(self) -> str:
        """Bits of weights and activations, and scaling of activations, e.g. ``W4A4 static``."""
        return arithmetic_of(self.inputs, self.terms, self.first.mode)

    @property
    def is_fp8(self) -> bool:
        """Whether inputs are E4M3."""
        return self.first.mode == "w4a8"

    @property
    def weight_layout(self) -> WeightLayout:
        """Layout of the weights; references, which read every layout, tell FP8 by the layout."""
        return "folded" if self.is_fp8 else self.first.weight_layout


def make_plan(
    activation: Activation,
    *,
    gated: bool,
    inputs: Inputs,
    requested: RequestedTerms | None,
    option: RequestedActivation = "per-token",
    why_not_fp8: str = "",
    choice: Choice | None = None,
) -> ExpertsPlan:
    """Choose the kernels of a layer for this process's device.

    Args:
        activation: activation between the GEMMs.
        gated: whether experts have a gate projection.
        inputs: requested quantization of both GEMMs' inputs; the plan may have another.
        requested: number of NVFP4 terms that the user requested for the layer; None: no request.
        option: the user's option ``activation``.
        why_not_fp8: reason why the layer cannot take FP8 activations; empty if it can.
        choice: top-k choice of experts, if our kernels choose.

    Raises:
        InvalidOption, NoKernelError: see ``choose_kernels``.
    """
    table = GROUPED_SILU_MUL_GEMM if gated else GROUPED_GEMM
    chosen = choose_kernels(
        table, inputs, requested, _ENTRIES, option=option, why_not_fp8=why_not_fp8
    )
    device, between = current_device(), None
    if chosen.activation == "per-token":
        between = MOE_DISPATCH.select(device, chosen.kernel.mode)
    return ExpertsPlan(
        enter=chosen.quantizer or MOE_DISPATCH.select(device, "float"),
        first=chosen.kernel,
        between=between,
        second=GROUPED_GEMM.select(device, chosen.kernel.mode),
        combine=MOE_COMBINE.select(device, "float"),
        inputs=chosen.activation,
        terms=chosen.terms,
        gated=gated,
        activation=activation,
        choice=choice,
        reason=chosen.reason,
    )


def activation_of(layer: Any) -> Activation:
    """Activation of vLLM's layer of routed experts, as our ``Activation``."""
    config = layer.moe_config
    name = config.activation.value.removesuffix(_NO_MUL)
    if name in _OF_ONE_MODEL:
        return _OF_ONE_MODEL[name]
    if name == "situ":
        bound = config.activation_situ_linear_beta
        # vLLM's kernels treat a limit that is not positive as none.
        limit = bound if bound is not None and bound > 0 else None
        return Activation(name, limit, config.activation_situ_beta)
    return Activation(
        name,
        layer.swiglu_limit,
        1.0 if layer.swiglu_alpha is None else layer.swiglu_alpha,
        layer.swiglu_beta or 0.0,
    )


def unsupported_reason(layer: Any) -> str | None:
    """Reason why our kernels cannot run a layer, with the accepted values; None if they can."""
    config = layer.moe_config
    return _of_arithmetic(config) or _of_sizes(config) or _of_ranks(config.moe_parallel_config)


def _of_arithmetic(config: Any) -> str | None:
    activation = config.activation.value
    names = GATED_NAMES if config.is_act_and_mul else tuple(f"{name}{_NO_MUL}" for name in UNGATED)
    if activation not in names:
        return f"its activation is {activation}, must be {', '.join(names)}"
    if activation == "situ" and not (config.activation_situ_beta or 0) > 0:
        return f"its activation_situ_beta is {config.activation_situ_beta}, must be positive"
    if config.is_lora_enabled:
        return "LoRA is enabled, must not be for NVFP4 experts; leave out --enable-lora"
    return None


def _of_sizes(config: Any) -> str | None:
    for which, size in (
        ("H", config.hidden_dim),
        ("I on a rank", config.intermediate_size_per_partition),
    ):
        if size % BLOCK_SIZE:
            return (
                f"{which} is {size}, must be a multiple of {BLOCK_SIZE}; use a smaller "
                "--tensor-parallel-size, or --enable-expert-parallel"
            )
    return None


def _of_ranks(parallel: Any) -> str | None:
    if parallel.enable_eplb:
        return "experts are balanced over ranks, must not be; leave out --enable-eplb"
    if parallel.use_all2all_kernels and parallel.all2all_backend != ALL2ALL:
        return (
            f"all2all-backend is {parallel.all2all_backend}, must be {ALL2ALL}; leave out "
            "--all2all-backend"
        )
    return None


def cpu_unsupported_reason(layer: Any) -> str | None:
    """Reason why vLLM cannot serve a layer on a CPU, with the remedy; None if vLLM can."""
    ranks = layer.moe_config.moe_parallel_config.dp_size
    module, _, communicator = current_platform.get_device_communicator_cls().rpartition(".")
    if ranks > 1 and "all_gatherv" not in vars(getattr(import_module(module), communicator)):
        return (
            f"data_parallel_size is {ranks}, must be 1 on a CPU, where vLLM does not send tokens "
            "between data-parallel ranks; leave out --data-parallel-size, or serve the model on a "
            "GPU"
        )
    grouped = layer.use_grouped_topk or layer.custom_routing_function is not None
    biased = layer.e_score_correction_bias is not None
    plain = layer.scoring_func == "softmax" and not biased
    if grouped or plain or layer.scoring_func == "sqrtsoftplus":
        return None
    return (
        f"its router scores experts by {layer.scoring_func}{' with a bias' if biased else ''} and "
        "without groups, which vLLM's router on CPU does not, must be softmax without a bias, or "
        "in groups; serve the model on a GPU"
    )


def is_on_cpu() -> bool:
    """Whether layers are built for a CPU."""
    return device_family(current_device()) == "cpu"
