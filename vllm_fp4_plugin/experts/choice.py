"""Choice of the method for a layer of quantised experts."""

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, UnquantizedFusedMoEMethod

from nvfp4_kernels.activation import SILU
from nvfp4_kernels.dispatch import NoKernelError
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from vllm_fp4_plugin.arithmetic.requested_terms import RequestedTerms
from vllm_fp4_plugin.checkpoint import completeness
from vllm_fp4_plugin.delegated import choice as delegated
from vllm_fp4_plugin.device import is_planned
from vllm_fp4_plugin.experts.method import Nvfp4ExpertsMethod
from vllm_fp4_plugin.experts.online import Nvfp4OnlineExpertsMethod
from vllm_fp4_plugin.experts.plan import GATED_NAMES, is_on_cpu, make_plan
from vllm_fp4_plugin.experts.record import matrices, unquantized
from vllm_fp4_plugin.experts.vllm_methods import backend, keeps_16_bits, vllm_experts
from vllm_fp4_plugin.formats import CheckpointConfig, LayerGroup, UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.ignore import covered
from vllm_fp4_plugin.options import KEY, Options
from vllm_fp4_plugin.options import Activation as Inputs
from vllm_fp4_plugin.report import LayerRecord
from vllm_fp4_plugin.startup import Startup


def choose(
    layer: Any,
    prefix: str,
    group: LayerGroup,
    checkpoint: CheckpointConfig,
    options: Options,
    startup: Startup,
    reason: str,
    terms: RequestedTerms | None,
) -> FusedMoEMethodBase:
    """Choose the method of a layer of quantised experts, and report the choice.

    vLLM's method is chosen if ours does not support the layer, or if the user wants vLLM's.

    Args:
        layer: vLLM's layer of routed experts.
        prefix: name of the layer.
        group: quantization scheme of the experts, not 16-bit.
        checkpoint: content of the checkpoint's config.
        options: options of the user.
        startup: records the choice for the report, and when the weights are in place.
        reason: reason for the scheme, for the report.
        terms: number of NVFP4 terms that the user requested for the inputs of both GEMMs; None: no
            request.

    Raises:
        UnsupportedCheckpoint: no method that the user's options allow serves these experts.
    """
    completeness.check_load_format(get_current_vllm_config().load_config.load_format)
    why_not = _why_not_ours(prefix, group, options)
    if why_not is None:
        try:
            method = Nvfp4ExpertsMethod(
                startup, options, layer, prefix, checkpoint,
                weight_only=group.kind is Kind.NVFP4_A16, terms=terms,
            )  # fmt: skip
        except (UnsupportedCheckpoint, NoKernelError) as error:
            why_not = str(error).removeprefix(f"{prefix}: ")
        else:
            startup.pending.add(prefix)
            method.reason = reason
            method.add_record()
            return method
    if options.experts == "own" or is_on_cpu():
        raise UnsupportedCheckpoint(f"{prefix}: {why_not}")
    startup.pending.add(prefix)
    if options.experts == "vllm" or not group.kind.is_nvfp4:
        why_not = ""  # no reason to report: vLLM's method is expected here
    return _delegated(layer, prefix, group, checkpoint, startup, (reason, why_not))


def choose_online(
    layer: Any, prefix: str, options: Options, startup: Startup, terms: RequestedTerms | None
) -> FusedMoEMethodBase | None:
    """Choose and report the method of a layer of 16-bit experts; None: vLLM runs them in 16 bits.

    Args:
        layer: vLLM's layer of routed experts.
        prefix: name of the layer.
        options: options of the user.
        startup: records the choice for the report, and when the weights are in place.
        terms: as in ``choose``.

    Raises:
        UnsupportedCheckpoint, NoKernelError: the option ``experts`` is ``"own"``, and our kernels
            cannot serve the layer.
    """
    pattern = covered(prefix, options.ignore, {})
    if pattern is not None:
        startup.report.add(unquantized(layer, prefix, f"ignored by {pattern!r}"))
        return None
    if options.experts == "vllm":
        startup.report.add(unquantized(layer, prefix, f"{KEY}.experts is 'vllm'"))
        return None
    try:
        method = Nvfp4OnlineExpertsMethod(startup, options, layer, prefix, terms)
    except (UnsupportedCheckpoint, NoKernelError) as error:
        if options.experts == "own":
            raise
        reason = str(error).removeprefix(f"{prefix}: ")
        startup.report.add(unquantized(layer, prefix, reason))
        return None
    startup.pending.add(prefix)
    method.add_record()
    return method


def _why_not_ours(prefix: str, group: LayerGroup, options: Options) -> str | None:
    """Reason why our method must not be tried; None if it may be tried."""
    if not group.kind.is_nvfp4:
        where = " on CPU; serve the model on a GPU" if is_on_cpu() else "; leave out experts='own'"
        return f"holds {group.kind} experts, must hold NVFP4 or 16-bit ones{where}"
    if options.experts == "vllm":
        return (
            f"{KEY}.experts is 'vllm', which has no methods for NVFP4 experts on CPU; leave the "
            "option out"
        )
    return None


def _delegated(
    layer: Any,
    prefix: str,
    group: LayerGroup,
    checkpoint: CheckpointConfig,
    startup: Startup,
    reasons: tuple[str, ...],
) -> FusedMoEMethodBase:
    """Get vLLM's own method for a layer; report the method, with ``reasons``."""
    method: FusedMoEMethodBase
    arithmetic, kernel, unquantised = arithmetic_of(group), f"{group.kind.family} (vLLM)", ""
    if is_planned():
        # vLLM would query the local GPU, and experts that never run may use any method.
        method = UnquantizedFusedMoEMethod(layer.moe_config)
    else:
        method, name = vllm_experts(layer, prefix, group, checkpoint, startup)
        kernel = f"{group.kind.family} (vLLM: {name})"
        if group.kind is Kind.NVFP4 and keeps_16_bits(method):
            arithmetic, unquantised = "W4A16", f"{backend(method)} leaves activations in 16 bits"
    reason = "; ".join(filter(None, (*reasons, unquantised)))
    elements = sum(count * n * k for count, n, k in matrices(layer.moe_config))
    size = sum(
        count * _matrix_bytes(n, k, group.kind) for count, n, k in matrices(layer.moe_config)
    )
    startup.report.add(LayerRecord(prefix, kernel, arithmetic, reason, elements, size))
    return method


def projections(layer: Any) -> list[str]:
    """Names in the checkpoint of an expert's three projections, or two without a gate."""
    names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    return [name for name in names if name is not None]


def planned(
    prefix: str, group: LayerGroup, options: Options, terms: RequestedTerms | None, activation: str
) -> tuple[str, str, str]:
    """Kernel label, arithmetic and reason for gated experts, from checkpoint headers alone.

    ``activation`` is vLLM's name for the experts' activation function.

    Raises:
        UnsupportedCheckpoint: no method would serve the experts.
    """
    why_not = _why_not_ours(prefix, group, options)
    if activation not in GATED_NAMES:
        why_not = f"its activation is {activation}, must be {', '.join(GATED_NAMES)}"
    if why_not is None:
        inputs: Inputs = "16-bit" if group.kind is Kind.NVFP4_A16 else "static"
        try:
            plan = make_plan(
                SILU, gated=True, inputs=inputs, requested=terms, option=options.activation
            )
        except NoKernelError as error:
            why_not = str(error)
        else:
            return plan.first.label, plan.arithmetic, plan.reason
    if options.experts == "own" or is_on_cpu():
        raise UnsupportedCheckpoint(f"{prefix}: {why_not}")
    why = "" if options.experts == "vllm" or not group.kind.is_nvfp4 else why_not
    return f"{group.kind.family} (vLLM)", arithmetic_of(group), why


def arithmetic_of(group: LayerGroup) -> str:
    """Bits of weights and activations with vLLM's methods for experts, e.g. ``W4A4 static``."""
    if group.kind.is_nvfp4:
        return "W4A4 static" if group.kind is Kind.NVFP4 else "W4A16"
    return delegated.arithmetic(group)


def _matrix_bytes(n: int, k: int, kind: Kind) -> int:
    return n * k // 2 + n * k // BLOCK_SIZE + 4 if kind.is_nvfp4 else kind.weight_bytes(n, k)
