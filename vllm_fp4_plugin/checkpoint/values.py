"""Checks of a local checkpoint's values: scales before a load, all other values on demand."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from vllm_fp4_plugin import kernel_weight
from vllm_fp4_plugin.checkpoint.files import TensorHeader, quantised_modules
from vllm_fp4_plugin.checkpoint.kinds_stored import find_kinds, layer_of
from vllm_fp4_plugin.formats import CheckpointConfig, UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import Kind

_FLOATS = ("F64", "F32", "F16", "BF16")
# Bits that are all set in the NaNs, and in the infinities of E5M2, of each 8-bit dtype.
_NOT_FINITE = {"F8_E4M3": 0x7F, "F8_E5M2": 0x7C, "F8_E8M0": 0xFF}
_PIECE = 1 << 24  # elements checked at a time


def read_tensors(
    headers: Mapping[str, TensorHeader], names: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Read tensors; yield their names and values, grouped by file."""
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name in names:
        by_file[headers[name].file].append(name)
    for file, in_it in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for name in in_it:
                yield name, tensors.get_tensor(name)


def check_global_scales(headers: Mapping[str, TensorHeader], checkpoint: CheckpointConfig) -> int:
    """Check the global scales of weights and activations, and the scales of an FP8 KV cache.

    Returns:
        Number of scales checked.

    Raises:
        UnsupportedCheckpoint: a scale is NaN, or outside ``kernel_weight``'s MIN_GLOBAL to
            MAX_GLOBAL.
    """
    names = global_scales(headers, checkpoint)
    for name, values in read_tensors(headers, names):
        kernel_weight.check_globals(f"{headers[name].file}: {name}", values.float())
    return len(names)


def global_scales(headers: Mapping[str, TensorHeader], checkpoint: CheckpointConfig) -> list[str]:
    """Names of the global scales and KV-cache scales that serving uses."""
    names = checkpoint.names
    used = [names.weight_global, names.k_scale, names.v_scale]
    if checkpoint.groups or checkpoint.is_silent:
        return list(_scales_by_layer(headers, checkpoint, used))
    if not checkpoint.weight_only:
        used.append(names.input_global)
    suffixes = tuple(f".{name}" for name in used)
    return [name for name in headers if name.endswith(suffixes)]


def _scales_by_layer(
    headers: Mapping[str, TensorHeader], checkpoint: CheckpointConfig, used: Sequence[str]
) -> Iterator[str]:
    """Yield names of the per-tensor scales that a mixed-precision checkpoint's layers use.

    ``used``: endings of the names of scales that every layer uses.
    """
    found, suffixes = find_kinds(headers, checkpoint), tuple(f".{name}" for name in used)
    for name in headers:
        module, _, tensor = name.rpartition(".")
        layer, _ = layer_of(module)
        if name.endswith(suffixes):
            yield name
        elif layer in found:
            kind, inputs = found[layer].group.kind, found[layer].group.inputs
            is_input = kind is Kind.NVFP4 and tensor == checkpoint.names.input_global
            is_static = inputs == "static" and tensor == "input_scale"
            if is_input or is_static or (kind is Kind.FP8 and tensor == "weight_scale"):
                yield name


def check_values(headers: Mapping[str, TensorHeader], checkpoint: CheckpointConfig | None) -> None:
    """Check that all floating-point values are finite, and NVFP4 block scales valid.

    A block scale must be positive, or zero in a block of zeros.

    Args:
        headers: the checkpoint's tensors.
        checkpoint: content of the quantization config; None if nothing is quantised.

    Raises:
        UnsupportedCheckpoint: the message names the first tensor with an invalid value.
    """
    floats = [name for name, header in headers.items() if header.dtype in _FLOATS]
    for name, values in read_tensors(headers, floats):
        check_finite(lambda name=name: f"{headers[name].file}: {name}", values)  # type: ignore[misc]
    block_scales = set()
    if checkpoint is not None:
        modules = quantised_modules(headers, checkpoint.names)
        block_scales = {f"{module}.{checkpoint.names.block_scale}" for module in modules}
    narrow = [n for n, h in headers.items() if h.dtype in _NOT_FINITE and n not in block_scales]
    for name, values in read_tensors(headers, narrow):
        _check_codes(f"{headers[name].file}: {name}", values, _NOT_FINITE[headers[name].dtype])
    if checkpoint is None:
        return
    names = checkpoint.names
    for module in quantised_modules(headers, names):
        tensors = [f"{module}.{part}" for part in (names.block_scale, names.weight)]
        scales, codes = (tensor for _, tensor in read_tensors(headers, tensors))
        kernel_weight.check_block_scales(f"{headers[tensors[0]].file}: {tensors[0]}", scales, codes)


def check_finite(name: Callable[[], str], values: Tensor) -> None:
    """Check in one pass that a tensor of a 16-bit or wider dtype holds no NaN and no infinity.

    Args:
        name: file and name of the tensor, for the message.
        values: tensor of any dtype; dtypes of eight bits and less are skipped.

    Raises:
        UnsupportedCheckpoint: a value is NaN or infinite.
    """
    if not values.is_floating_point() or values.element_size() < 2 or not values.numel():
        return
    if all(math.isfinite(extreme) for extreme in torch.aminmax(values)):
        return
    faults = sum(int((~torch.isfinite(piece)).sum()) for piece in values.flatten().split(_PIECE))
    raise _not_finite(name(), faults)


def _check_codes(name: str, values: Tensor, mask: int) -> None:
    """Check that no value of an 8-bit dtype has all bits of ``mask`` set; see ``_NOT_FINITE``."""
    pieces = values.view(torch.uint8).flatten().split(_PIECE)
    faults = sum(int(((piece & mask) == mask).sum()) for piece in pieces)
    if faults:
        raise _not_finite(name, faults)


def _not_finite(name: str, faults: int) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        f"{name}: holds {faults} NaN or infinite values, must be finite; copy or download "
        "the checkpoint again, or export the model again"
    )
