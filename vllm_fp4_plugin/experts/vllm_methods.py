"""vLLM's own methods for quantised experts, checked by a ledger while loading."""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization import get_quantization_config

from vllm_fp4_plugin.delegated.vllm_methods import fp8_blocks
from vllm_fp4_plugin.experts.joined_scales import PROPORTIONAL, GlobalScales, described, join
from vllm_fp4_plugin.experts.ledger import ExpertLedger, nvfp4_forms
from vllm_fp4_plugin.formats import (
    INVERSE_SCALE,
    CheckpointConfig,
    LayerGroup,
    UnsupportedCheckpoint,
)
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.kernel_weight import MAX_GLOBAL, are_globals
from vllm_fp4_plugin.startup import Startup


def vllm_experts(
    layer: Any, prefix: str, group: LayerGroup, checkpoint: CheckpointConfig, startup: Startup
) -> tuple[FusedMoEMethodBase, str]:
    """Get vLLM's method for a layer of experts, and the name of method and backend for the report.

    The config passed to vLLM covers this one layer, whose scheme is already known.

    Raises:
        UnsupportedCheckpoint: vLLM has no method.
    """
    try:
        method = _config(prefix, group, checkpoint).get_quant_method(layer, prefix)
    except (AssertionError, ValueError, NotImplementedError, RuntimeError) as error:
        raise _refusal(prefix, group, f"({error})") from error
    if method is None or isinstance(method, UnquantizedFusedMoEMethod):
        raise _refusal(prefix, group, "and would take them for 16-bit ones")
    _watch(method, ExpertLedger(layer, prefix), group, checkpoint, startup)
    return method, " ".join(filter(None, (type(method).__name__, backend(method))))


def backend(method: Any) -> str:
    """Name of the backend of a vLLM method's GEMMs; empty if unknown."""
    found = (
        value.name
        for name, value in vars(method).items()
        if name.endswith("backend") and isinstance(value, Enum) and value.name != "NONE"
    )
    return next(found, "")


def keeps_16_bits(method: Any) -> bool:
    """Whether a method of vLLM runs NVFP4 GEMMs with 16-bit activations.

    Marlin does; Humming does unless ``VLLM_HUMMING_INPUT_QUANT_CONFIG`` is set.
    """
    name = backend(method)
    return name == "MARLIN" or (name == "HUMMING" and not envs.VLLM_HUMMING_INPUT_QUANT_CONFIG)


def _config(prefix: str, group: LayerGroup, checkpoint: CheckpointConfig) -> Any:
    settings = group.settings
    if group.scale == INVERSE_SCALE:
        return fp8_blocks()
    if group.kind.is_nvfp4:  # a config of NVFP4 alone stores no config per layer
        written = checkpoint.format.group(group.kind, static_input=True)
        assert written is not None
        settings = written.settings
    if checkpoint.format.name == "modelopt":
        fields: dict[str, Any] = {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {prefix: dict(settings)},
        }
        return get_quantization_config("modelopt_mixed").from_config(fields)
    fields = {
        "format": settings["format"],
        # vLLM treats experts as linears under any name.
        "config_groups": {"group_0": dict(settings) | {"targets": ["Linear"]}},
        "ignore": [],
    }
    return get_quantization_config("compressed-tensors").from_config(fields)


def _watch(
    method: Any,
    ledger: ExpertLedger,
    group: LayerGroup,
    checkpoint: CheckpointConfig,
    startup: Startup,
) -> None:
    """Patch a method to check its tensors by the ledger, and to join scales, while loading.

    The instance is patched, as a subclass would fail vLLM's tests of the class name.
    """
    create, process = method.create_weights, method.process_weights_after_loading

    def create_weights(
        layer: Any, *args: Any, weight_loader: Callable[..., Any], **kw: Any
    ) -> None:
        create(layer, *args, weight_loader=ledger.loader(weight_loader), **kw)
        forms = nvfp4_forms(checkpoint.names) if group.kind.is_nvfp4 else {}
        for name in dict(layer.named_parameters(recurse=False)):
            part, _, tensor = name.partition("_")
            if part == "w13" and not _is_optional(tensor, group.kind, checkpoint):
                ledger.expect(tensor, forms.get(tensor))

    def process_weights_after_loading(layer: Any) -> None:
        if get_current_vllm_config().load_config.load_format != "dummy":
            ledger.check_complete()
            if group.kind.is_nvfp4:
                _join(layer, ledger, checkpoint, startup, backend(method))
        process(layer)
        startup.loaded(ledger.prefix, next(layer.parameters()).device)

    method.ledger = ledger
    method.create_weights = create_weights
    method.process_weights_after_loading = process_weights_after_loading


def _is_optional(tensor: str, kind: Kind, checkpoint: CheckpointConfig) -> bool:
    unused = kind is Kind.NVFP4_A16 and tensor == checkpoint.names.input_global
    return unused or tensor == "bias"


def _join(
    layer: Any,
    ledger: ExpertLedger,
    checkpoint: CheckpointConfig,
    startup: Startup,
    runs_on: str,
) -> None:
    """Note in the report that global scales of gate and up differ; join the scales if possible.

    Joining needs an activation that is proportional to up and has no limit; see ``joined_scales``.

    Raises:
        UnsupportedCheckpoint: the scales differ by too much.
    """
    names = checkpoint.names
    w13 = getattr(layer, f"w13_{names.weight_global}", None)
    if w13 is None or w13.ndim != 2 or w13.shape[1] != 2:
        return  # no gate, or joined by an earlier load
    w2 = getattr(layer, f"w2_{names.weight_global}").data
    w2_input = getattr(layer, f"w2_{names.input_global}").data
    # Some methods also hold the input scales of other ranks' experts.
    rows = ledger.local_experts if len(w2_input) > len(w2) else list(range(len(w2)))
    scales = GlobalScales(w13.data, w2, w2_input[rows], checkpoint.format.reciprocal)
    differ = described(scales.factors())
    if not differ:
        return
    note = f"global scales of gate and up {differ}"
    if layer.activation.value in PROPORTIONAL and layer.swiglu_limit is None:
        if not are_globals(scales.factors()):
            raise UnsupportedCheckpoint(
                f"{ledger.prefix}: {note}, must be within {MAX_GLOBAL:.0e} for a method of "
                "vLLM's, which takes one for both; quantise the model with one for gate and up"
            )
        join(scales)
        w2_input[rows] = scales.w2_input
        note += ": down's makes up for it"
    elif runs_on == "HUMMING":  # reads the layer's scales, not those passed by vLLM's method
        note += ": Humming rounds each to 16 bits"
    else:
        note += ": vLLM takes gate's for both"
    _add_reason(ledger.prefix, note, startup)


def _add_reason(prefix: str, note: str, startup: Startup) -> None:
    for record in startup.report.layers:
        if record.name == prefix and note not in record.reason:
            reason = "; ".join(filter(None, (record.reason, note)))
            startup.report.add(replace(record, reason=reason))
            return


def _refusal(prefix: str, group: LayerGroup, why: str) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        f"{prefix}: holds {group.kind} experts, which vLLM has no method for {why}; must be NVFP4, "
        "16-bit or what vLLM serves on this device; quantise the model with its experts excluded"
    )
