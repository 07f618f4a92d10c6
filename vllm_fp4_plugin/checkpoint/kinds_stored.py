"""Quantization schemes of layers from a checkpoint's tensors, checked against its config."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from vllm_fp4_plugin.checkpoint.files import TensorHeader
from vllm_fp4_plugin.checkpoint.kinds_declared import UNQUANTIZED, DeclaredKinds
from vllm_fp4_plugin.formats import (
    INVERSE_SCALE,
    SCALE,
    CheckpointConfig,
    Format,
    LayerGroup,
    TensorNames,
    UnsupportedCheckpoint,
)
from vllm_fp4_plugin.formats.kind import FP8_BLOCK_SIZE, MX_BLOCK_SIZE, NVFP4_KINDS, Kind

Tensors = Mapping[str, TensorHeader]

EXPERTS = "experts"  # all experts below this name are one layer

_WEIGHTS = ("weight", "weight_packed")
_SCALES = (
    SCALE, INVERSE_SCALE, "weight_scale_2", "weight_global_scale", "input_scale",
    "input_global_scale",
)  # fmt: skip
_FLOATS = ("BF16", "F16", "F32")
_FORMATS = (
    "U8 codes with block and global scales (NVFP4), F8_E4M3 with one scale, one a row, or one for "
    f"{FP8_BLOCK_SIZE}×{FP8_BLOCK_SIZE} weights (FP8, {SCALE} or {INVERSE_SCALE}, not both), "
    "F8_E4M3 or U8 with U8 scales for "
    f"{MX_BLOCK_SIZE} (MXFP8, MXFP4), or BF16, F16, F32"
)


class StoredKind(NamedTuple):
    """Quantization scheme of a module, from its tensors.

    Attributes:
        group: group that the module belongs to.
        config_says: scheme in the config if it differs from the tensors' scheme; else None.
        experts: number of experts, for a layer that stores tensors per expert; else 0.
    """

    group: LayerGroup
    config_says: Kind | None
    experts: int = 0


def find_kinds(headers: Tensors, checkpoint: CheckpointConfig) -> dict[str, StoredKind]:
    """Find the scheme of every layer with a weight matrix, by the layer's checkpoint name.

    All experts below one module ``experts`` are one layer. Where config and tensors differ, the
    tensors win.

    Raises:
        UnsupportedCheckpoint: tensors match no scheme, or contradict the config such that no scheme
            fits both; the message names module and file.
    """
    declared = DeclaredKinds(checkpoint)
    found: dict[str, StoredKind] = {}
    first: dict[str, str] = {}  # first module of each layer whose scheme was found
    experts: dict[str, int] = {}
    for module, tensors in _modules(headers).items():
        config_group = declared.group_of(module)
        group = _resolve(module, tensors, config_group, checkpoint)
        differs = config_group is not None and config_group.kind is not group.kind
        each = StoredKind(
            group, config_group.kind if config_group is not None and differs else None
        )
        layer, number = layer_of(module)
        experts[layer] = max(experts.get(layer, 0), number)
        other = found.setdefault(layer, each)
        if other is not each:
            _check_experts_alike(first[layer], other.group, module, group)
        first.setdefault(layer, module)
    return {layer: each._replace(experts=experts[layer]) for layer, each in found.items()}


def _check_experts_alike(one: str, its: LayerGroup, other: str, others: LayerGroup) -> None:
    if its.way != others.way:
        raise UnsupportedCheckpoint(
            f"{other}: is {others.called}, but {one} of the same layer is {its.called}; experts of "
            "a layer must be quantised in one way or not at all, so quantise the model with one "
            "format for all of them"
        )


def layer_of(module: str) -> tuple[str, int]:
    """Layer that a module belongs to, and the module's expert index plus 1 (0 if not an expert)."""
    before, dot, below = module.partition(f".{EXPERTS}.")
    if not dot:
        return module, 0
    number = below.partition(".")[0]
    return f"{before}.{EXPERTS}", int(number) + 1 if number.isdecimal() else 0


def _modules(headers: Tensors) -> dict[str, dict[str, TensorHeader]]:
    """Weight and scales of each module with a weight matrix, by module name and tensor name."""
    found: dict[str, dict[str, TensorHeader]] = {}
    for name, header in headers.items():
        module, _, tensor = name.rpartition(".")
        if tensor in _WEIGHTS or tensor in _SCALES:
            found.setdefault(module, {})[tensor] = header
    return {m: tensors for m, tensors in found.items() if _has_matrix(tensors.items())}


def _has_matrix(tensors: Iterable[tuple[str, TensorHeader]]) -> bool:
    return any(tensor in _WEIGHTS and len(header.shape) == 2 for tensor, header in tensors)


def _resolve(
    module: str, tensors: Tensors, config_group: LayerGroup | None, checkpoint: CheckpointConfig
) -> LayerGroup:
    """Group of a module: the config's if its scheme fits, else a group of the likeliest scheme."""
    group = _group(module, tensors, config_group, checkpoint)
    return replace(group, scale=INVERSE_SCALE) if INVERSE_SCALE in tensors else group


def _group(
    module: str, tensors: Tensors, config_group: LayerGroup | None, checkpoint: CheckpointConfig
) -> LayerGroup:
    readings = _readings(tensors, checkpoint.format)
    if not readings:
        raise _table(module, tensors) if _is_part_of_table(module) else _unknown(module, tensors)
    if config_group is not None:
        _check_config(module, tensors, config_group, readings, checkpoint.names)
        if config_group.kind in readings:
            return config_group
    kind = readings[0]
    if kind is Kind.UNQUANTIZED:
        return UNQUANTIZED
    like = [group for group in checkpoint.declared if group.kind is kind]
    static = "input_scale" in tensors
    matching = [group for group in like if (group.inputs == "static") == static or kind.is_nvfp4]
    if matching:
        return matching[0]
    if kind.is_nvfp4:
        return LayerGroup("the headers", kind)
    group = checkpoint.format.group(kind, static_input=static)
    if group is None:
        raise UnsupportedCheckpoint(
            f"{module}: is {kind} in {_file(tensors)}, which {checkpoint.format.name}'s format has "
            "not; quantise the model with one tool"
        )
    _check_input(module, tensors, group)
    return group


def _check_config(
    module: str,
    tensors: Tensors,
    config_group: LayerGroup,
    readings: tuple[Kind, ...],
    names: TensorNames,
) -> None:
    """Raise if config and tensors contradict each other such that no scheme fits both."""
    if config_group.kind in readings:
        _check_input(module, tensors, config_group)
    elif config_group.kind is Kind.NVFP4 and Kind.NVFP4_A16 in readings:
        raise _missing(module, tensors, names.input_global, config_group)
    elif config_group.kind.family == readings[0].family and not config_group.kind.is_nvfp4:
        scale = INVERSE_SCALE if INVERSE_SCALE in tensors else SCALE
        shape = tensors[scale].shape
        raise UnsupportedCheckpoint(
            f"{module}.{scale}: its shape in {_file(tensors)} is {shape}, which is "
            f"{readings[0]}, must be {config_group.kind} as {config_group.where} says; export the "
            "checkpoint again"
        )


def _check_input(module: str, tensors: Tensors, group: LayerGroup) -> None:
    """Raise if a non-NVFP4 module lacks its static input scale, or has one that is not used."""
    if group.kind.is_nvfp4 or group.kind is Kind.UNQUANTIZED:
        return
    if group.inputs == "static" and "input_scale" not in tensors:
        raise _missing(module, tensors, "input_scale", group)
    if group.inputs != "static" and "input_scale" in tensors:
        raise UnsupportedCheckpoint(
            f"{module}.input_scale: is in {_file(tensors)}, must not be, as {group.where} says "
            f"that the inputs of {group.kind} layers are scaled as they come; export it again"
        )


def _readings(tensors: Tensors, format: Format) -> tuple[Kind, ...]:
    """Schemes that fit a module's tensors, the likeliest first."""
    names, is_packed = format.names, "weight_packed" in tensors
    weight = tensors["weight_packed" if is_packed else "weight"]
    scale, inverse = tensors.get(SCALE), tensors.get(INVERSE_SCALE)
    if weight.dtype in _FLOATS:
        return (Kind.UNQUANTIZED,) if scale is inverse else ()  # both None
    if len(weight.shape) != 2 or (scale is None) == (inverse is None):
        return ()
    if inverse is not None:
        return _blocks(weight, inverse)
    assert scale is not None
    n, k = weight.shape
    if weight.dtype == "U8":
        if names.weight_global in tensors:
            return NVFP4_KINDS if names.input_global in tensors else (Kind.NVFP4_A16,)
        mx = scale.dtype == "U8" and scale.shape == (n, 2 * k // MX_BLOCK_SIZE)
        return (Kind.MXFP4,) if mx and is_packed else ()
    if weight.dtype != "F8_E4M3" or is_packed:
        return ()
    if scale.dtype == "U8":
        return (Kind.MXFP8,) if scale.shape == (n, k // MX_BLOCK_SIZE) else ()
    return _granularities(n, k, scale.shape, format) if scale.dtype in _FLOATS else ()


def _blocks(weight: TensorHeader, scale: TensorHeader) -> tuple[Kind, ...]:
    """Schemes that fit a weight whose scale is ``INVERSE_SCALE``: FP8 blocks, or no scheme."""
    shape = tuple(-(-size // FP8_BLOCK_SIZE) for size in weight.shape)
    fits = weight.dtype == "F8_E4M3" and scale.dtype in _FLOATS and scale.shape == shape
    return (Kind.FP8_BLOCK,) if fits else ()


def _granularities(n: int, k: int, shape: tuple[int, ...], format: Format) -> tuple[Kind, ...]:
    """FP8 schemes that store scales of ``shape``; a small weight ``(n, k)`` may fit several."""
    rows, columns = -(-n // FP8_BLOCK_SIZE), -(-k // FP8_BLOCK_SIZE)
    shapes = {
        Kind.FP8: [(), (1,), (1, 1)],
        Kind.FP8_CHANNEL: [(n,), (n, 1)],
        Kind.FP8_BLOCK: [(rows, columns), (rows, 1, columns, 1)],
    }
    return tuple(
        kind
        for kind, accepted in shapes.items()
        if shape in accepted and format.scale_dims.get(kind, len(shape)) == len(shape)
    )


def _missing(
    module: str, tensors: Tensors, tensor: str, group: LayerGroup
) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        f"{module}.{tensor}: is missing beside the weight in {_file(tensors)}, must be there as "
        f"{group.where} says that the layer is {group.kind}; the checkpoint is incomplete, "
        "quantise the model again"
    )


def _unknown(module: str, tensors: Tensors) -> UnsupportedCheckpoint:
    came = ", ".join(f"{name} {h.dtype} {list(h.shape)}" for name, h in sorted(tensors.items()))
    return UnsupportedCheckpoint(
        f"{module}: holds {came} in {_file(tensors)}, must hold {_FORMATS}; quantise the model "
        "again, or leave --quantization out to let vLLM choose"
    )


def _is_part_of_table(module: str) -> bool:
    last = module.rpartition(".")[2]
    return last.startswith("shard_") and last.removeprefix("shard_").isdecimal()


def _table(module: str, tensors: Tensors) -> UnsupportedCheckpoint:
    dtype = tensors["weight"].dtype if "weight" in tensors else "packed"
    return UnsupportedCheckpoint(
        f"{module}: is a part of a table of embeddings that is {dtype} in {_file(tensors)}, must "
        "be in 16 bits; leave --quantization out to let vLLM choose"
    )


def _file(tensors: Tensors) -> str:
    return str(next(iter(tensors.values())).file)
