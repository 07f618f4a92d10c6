"""Report of a checkpoint from its files' headers, for models that vLLM cannot build here."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvfp4_kernels.gemm.kernels import KERNELS as GEMM_KERNELS
from vllm_fp4_plugin import batch_invariance, formats
from vllm_fp4_plugin.arithmetic.choice import arithmetic_of, choose_kernels, not_fp8
from vllm_fp4_plugin.arithmetic.requested_terms import RequestedTerms, requested_terms
from vllm_fp4_plugin.checkpoint import files as checkpoint_files
from vllm_fp4_plugin.checkpoint import values as checkpoint_values
from vllm_fp4_plugin.checkpoint.files import TensorHeader
from vllm_fp4_plugin.checkpoint.kinds_stored import EXPERTS, find_kinds, layer_of
from vllm_fp4_plugin.delegated import choice as delegated
from vllm_fp4_plugin.experts import choice as experts
from vllm_fp4_plugin.formats import CheckpointConfig, LayerGroup, UnsupportedCheckpoint
from vllm_fp4_plugin.formats.fields import read_object
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.options import Activation, Options
from vllm_fp4_plugin.report import LayerRecord, Report

NOTE = (
    "by the tensors' headers alone: what attention runs on, and which layers vLLM joins, is not "
    "known, nor whether the model needs more tensors than these"
)
_CONFIG = "config.json"
# Activation of the experts where it is not SiLU: headers lack it, and configs differ in spelling.
_ACTIVATIONS = {"KimiK3ForConditionalGeneration": "situ"}
_16_BITS = ("BF16", "F16")
_ELEMENTS_PER_BYTE = 2  # of packed weights


def headers_report(directory: Path, options: Options) -> Report:
    """Report which kernel each layer of a local checkpoint would get.

    Reads the config, the files' headers and the global scales.

    Args:
        directory: directory of the checkpoint.
        options: options of the user; ``activation_terms`` is matched against the names on disk.

    Raises:
        UnsupportedCheckpoint: the checkpoint is not quantised, or would be refused.
        NoKernelError: the device has no kernel for a layer of the checkpoint.
    """
    checkpoint = _checkpoint(directory)
    headers = checkpoint_files.read_headers(directory)
    checkpoint_files.check_nvfp4(headers, checkpoint)
    checkpoint_values.check_global_scales(headers, checkpoint)
    sizes, activation = _sizes(headers), _activation(directory)
    report = Report(notes=[NOTE])
    for layer, found in find_kinds(headers, checkpoint).items():
        elements, size = sizes[layer]
        says = found.config_says
        reason = f"{found.group.kind} in the checkpoint, whose config says {says}" if says else ""
        requested = requested_terms(options.activation_terms, layer, {})
        report.add(
            _record(layer, found.group, reason, elements, size, requested, options, activation)
        )
    for layer, stacked in _stacked_experts(headers, checkpoint).items():
        # Of stacks below a module ``experts`` all sizes are under that module's name.
        sizes_of = [sizes[name] for name in {layer_of(module)[0]: None for module in stacked}]
        elements, size = (sum(column) for column in zip(*sizes_of, strict=True))
        below = layer.endswith(f".{EXPERTS}")
        name, scale = layer if below else f"{layer}.{EXPERTS}", checkpoint.names.input_global
        has_scales = all(f"{module}.{scale}" in headers for module in stacked)
        kind = Kind.NVFP4 if has_scales else Kind.NVFP4_A16
        group = checkpoint.format.group(kind, static_input=has_scales)
        assert group is not None
        requested = requested_terms(options.activation_terms, name, {})
        report.add(_record(name, group, "", elements, size, requested, options, activation))
    for head in _tied_head(directory, headers):
        report.add(head)
    return report


def _tied_head(directory: Path, headers: Mapping[str, TensorHeader]) -> list[LayerRecord]:
    """Record of a head that the config ties to the embedding, the only matrix with tokens' rows."""
    config = _config(directory)
    config |= config.get("text_config") or {}
    if not config.get("tie_word_embeddings"):
        return []
    of_tokens = {
        name.removesuffix(".weight"): header
        for name, header in headers.items()
        if name.endswith(".weight") and header.shape[:-1] == (config.get("vocab_size"),)
    }
    if [header.dtype in _16_BITS for header in of_tokens.values()] != [True]:
        return []
    [(embedding, header)] = of_tokens.items()
    dtype = str(checkpoint_files.dtype_of(f"{embedding}.weight", header)).removeprefix("torch.")
    return [LayerRecord.head("lm_head", dtype, embedding)]


def _config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / _CONFIG).read_text(encoding="utf-8"))
    return config


def _activation(directory: Path) -> str:
    """Name of the activation function of the model's experts, by architecture; SiLU by default."""
    config = _config(directory)
    known = (
        _ACTIVATIONS[name] for name in config.get("architectures") or () if name in _ACTIVATIONS
    )
    return next(known, "silu")


def _stacked_experts(
    headers: Mapping[str, TensorHeader], checkpoint: CheckpointConfig
) -> dict[str, list[str]]:
    """Modules whose weight tensor stacks all experts, by layer."""
    layers: dict[str, list[str]] = {}
    for module in checkpoint_files.quantised_modules(headers, checkpoint.names):
        weight = headers.get(f"{module}.{checkpoint.names.weight}")
        if weight is not None and len(weight.shape) == checkpoint_files.STACKED:
            layers.setdefault(module.rpartition(".")[0], []).append(module)
    return layers


def _checkpoint(directory: Path) -> CheckpointConfig:
    file = directory / _CONFIG
    if not file.is_file():
        raise UnsupportedCheckpoint(
            f"{file}: is missing, must be in the directory of a checkpoint; download it"
        )
    try:
        config = read_object(_CONFIG, json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UnsupportedCheckpoint(f"{file}: is no JSON object ({error}); mend it") from error
    text = config.get("text_config") or {}
    for holder in (config, text):
        for field in ("quantization_config", "compression_config"):
            if holder.get(field):
                parsed = formats.parse(read_object(field, holder[field]))
                return (formats.parse_beside(directory) or parsed) if parsed.is_silent else parsed
    beside = formats.parse_beside(directory)
    if beside is None:
        raise UnsupportedCheckpoint(
            f"{file}: holds no quantization_config, must be that of a quantised checkpoint; "
            "leave --by-headers out for one that is quantised at load"
        )
    return beside


def _sizes(headers: Mapping[str, TensorHeader]) -> dict[str, tuple[int, int]]:
    """Number of weight elements, and bytes of all tensors, scales included, by layer."""
    sizes: dict[str, tuple[int, int]] = {}
    for name, header in headers.items():
        module, _, tensor = name.rpartition(".")
        count = math.prod(header.shape)
        elements = count if tensor in ("weight", "weight_packed") else 0
        elements *= _ELEMENTS_PER_BYTE if header.dtype == "U8" else 1
        layer, _ = layer_of(module)
        before = sizes.get(layer, (0, 0))
        size = count * checkpoint_files.dtype_of(name, header).itemsize
        sizes[layer] = before[0] + elements, before[1] + size
    return sizes


def _record(
    layer: str,
    group: LayerGroup,
    reason: str,
    elements: int,
    size: int,
    requested: RequestedTerms | None,
    options: Options,
    between: str,
) -> LayerRecord:
    kind = group.kind
    if kind is Kind.UNQUANTIZED:
        return LayerRecord.unquantized(layer, reason, elements, size)
    if layer.endswith(f".{EXPERTS}"):
        kernel, arithmetic, why = experts.planned(layer, group, options, requested, between)
        reasons = "; ".join(filter(None, (reason, why)))
        return LayerRecord(layer, kernel, arithmetic, reasons, elements, size)
    if not kind.is_nvfp4:
        by_reference = delegated.serves_by_reference(group)
        kernel = delegated.reference_label(group) if by_reference else f"{kind.family} (vLLM)"
        return LayerRecord(layer, kernel, delegated.arithmetic(group), reason, elements, size)
    activation: Activation = "16-bit" if kind is Kind.NVFP4_A16 else "static"
    choice = choose_kernels(
        GEMM_KERNELS, activation, requested, option=options.activation, why_not_fp8=not_fp8(layer),
        batch_invariant=batch_invariance.is_wanted(),
    )  # fmt: skip
    arithmetic = arithmetic_of(choice.activation, choice.terms, choice.kernel.mode)
    why = "; ".join(filter(None, (reason, choice.reason)))
    return LayerRecord(layer, choice.kernel.label, arithmetic, why, elements, size)
