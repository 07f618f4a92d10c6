"""Headers of a local checkpoint's files, read and checked before anything is loaded."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from vllm_fp4_plugin.formats import (
    FORMATS,
    CheckpointConfig,
    TensorNames,
    UnsupportedCheckpoint,
)

STACKED = 3  # dimensions of a tensor that stacks all experts of a layer

SIZES = (  # config fields that must not be negative
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("num_hidden_layers", "head_dim", "vocab_size"),
)
CONFIG, QUANTIZATION = "config.json", "quantization_config"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True)
class TensorHeader:
    """Header of one tensor in a safetensors file.

    Attributes:
        dtype: safetensors name of the dtype, e.g. ``"BF16"``, ``"U8"``, ``"F8_E4M3"``.
        shape: shape of the tensor.
        file: file that holds the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path


def local_directory(
    model: str, revision: str | None = None, cache: str | None = None
) -> Path | None:
    """Directory of a model's files: ``model``, or a complete copy in the hub's cache; else None.

    Args:
        model: directory of a checkpoint, or its name on the hub.
        revision: branch, tag or commit on the hub; None: the main branch.
        cache: directory of the cache; None: the hub's default.
    """
    directory = Path(model)
    if directory.is_dir():
        return directory
    try:
        path = snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
    except (OSError, ValueError):  # missing, or not a valid name on the hub
        return None
    found = Path(path)
    index = found / INDEX
    files = set(_read_index(index).values()) if index.exists() else {"model.safetensors"}
    return found if all((found / file).exists() for file in files) else None


def no_weights(source: str, others: Sequence[str]) -> UnsupportedCheckpoint:
    """Error for a checkpoint without safetensors files.

    Args:
        source: directory or name of the checkpoint.
        others: weight files in other formats.
    """
    holds = "no files of weights"
    if others:
        holds = f"weights in pickles ({Path(others[0]).name}), which may run code"
    return UnsupportedCheckpoint(
        f"{source}: holds {holds}, must hold safetensors files; save the model with "
        "save_pretrained(), which writes them"
    )


def check_config(directory: Path) -> None:
    """Check the fields of a checkpoint's ``config.json`` that vLLM reads unchecked.

    Raises:
        UnsupportedCheckpoint: the message names the file, the field, its value and accepted values.
    """
    file = directory / CONFIG
    if not file.is_file():
        return  # vLLM reports this itself, or reads another config
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(file, f"is no JSON that can be read ({error})") from error
    fields: list[tuple[str, object, type]] = [("", content, dict)]
    if isinstance(content, dict) and (section := content.get(QUANTIZATION)) is not None:
        fields.append((f"{QUANTIZATION}: ", section, dict))
        if isinstance(section, dict):
            read = ("quant_method", str), ("producer", dict)
            fields += [(f"{QUANTIZATION}.{n}: ", section[n], t) for n, t in read if n in section]
    if isinstance(content, dict):
        for name in SIZES:
            if isinstance(size := content.get(name), int) and size < 0:
                raise UnsupportedCheckpoint(
                    f"{file}: {name}: is {size}, must not be negative; mend it"
                )
    for field, value, kind in fields:
        if not isinstance(value, kind):
            must = "an object" if kind is dict else "a string"
            raise UnsupportedCheckpoint(
                f"{file}: {field}is {json.dumps(value)[:80]}, must be {must}; copy or download "
                "the checkpoint again, or export the model again"
            )


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """Read headers, by tensor name, from a checkpoint's safetensors files; {} without files.

    Raises:
        UnsupportedCheckpoint: the index names a missing file, or a tensor that its file lacks, or a
            file is truncated or damaged.
    """
    if not (directory / INDEX).exists():
        files = sorted(directory.glob("*.safetensors"))
        return {name: header for file in files for name, header in read_file(file).items()}
    weight_map = _read_index(directory / INDEX)
    headers: dict[str, TensorHeader] = {}
    for shard in sorted(set(weight_map.values())):
        file = directory / shard
        if not file.exists():
            raise _damaged(file, f"is missing, but {INDEX} names it")
        headers |= read_file(file)
    for name, shard in weight_map.items():
        if name not in headers:
            raise _damaged(directory / shard, f"holds no tensor {name}, but {INDEX} says so")
    return headers


def _read_index(index: Path) -> dict[str, str]:
    """Read an index: the file of each tensor, by tensor name."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(index, f"is no JSON ({error})") from error
    if not isinstance(content, dict) or "weight_map" not in content:
        raise _damaged(index, "holds no weight_map, must be an object that has one")
    weight_map = content["weight_map"]
    if not isinstance(weight_map, dict):
        kind = type(weight_map).__name__
        raise _damaged(index, f"weight_map: is a {kind}, must be an object of tensors' files")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise _damaged(index, f"weight_map: of {name} is {shard!r}, must be the name of a file")
        if Path(shard).is_absolute() or ".." in Path(shard).parts:
            outside = f"weight_map: of {name} is {shard!r}, must lie in the checkpoint's folder"
            raise _damaged(index, outside)
    return weight_map


def read_file(file: Path) -> dict[str, TensorHeader]:
    """Headers of a safetensors file's tensors, by name.

    Raises:
        UnsupportedCheckpoint: the file is truncated or damaged, or cannot be read.
    """
    headers = {}
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                part = tensors.get_slice(name)
                headers[name] = TensorHeader(part.get_dtype(), tuple(part.get_shape()), file)
    except SafetensorError as error:
        raise _damaged(file, f"is truncated or no safetensors file ({error})") from error
    except OSError as error:
        raise _damaged(file, f"cannot be read ({error})") from error
    return headers


def dtype_of(name: str, header: TensorHeader) -> torch.dtype:
    """Look up the torch dtype of a tensor.

    Raises:
        UnsupportedCheckpoint: the dtype is not in ``DTYPES``.
    """
    if header.dtype not in DTYPES:
        raise UnsupportedCheckpoint(
            f"{header.file}: {name}: dtype is {header.dtype}, must be one of {', '.join(DTYPES)}; "
            "export the model again"
        )
    return DTYPES[header.dtype]


def check_nvfp4(headers: Mapping[str, TensorHeader], checkpoint: CheckpointConfig) -> None:
    """Check the tensors of every NVFP4 linear: all present, with the right dtypes and shapes.

    Of stacked experts' tensors only the presence is checked, and the dtype of the codes.

    Raises:
        UnsupportedCheckpoint: the message names the tensor, its dtype or shape, and the accepted
            value; or the checkpoint has no NVFP4 linear, or one in another format.
    """
    names = checkpoint.names
    for other in FORMATS.values():
        foreign = _modules(headers, other.names.weight_global)
        if other.name != checkpoint.format.name and foreign:
            raise UnsupportedCheckpoint(
                f"{foreign[0]}.{other.names.weight_global}: belongs to {other.name}'s format, must "
                f"be in {checkpoint.format.name}'s, which the config declares; quantise the model "
                "with one tool"
            )
    modules = quantised_modules(headers, names)
    if not _modules(headers, names.weight_global):
        _refuse_other_names(headers, names)
        raise UnsupportedCheckpoint(
            f"checkpoint: holds no {names.weight_global}, so no NVFP4 weights, though its config "
            "declares them; quantise the model again"
        )
    for module in modules:
        _check_module(headers, module, names, weight_only=checkpoint.weight_only)


def _refuse_other_names(headers: Mapping[str, TensorHeader], names: TensorNames) -> None:
    """Raise for stacked experts' block scales (3-D E4M3), which here lack global scales."""
    for name, header in headers.items():
        if header.dtype == "F8_E4M3" and len(header.shape) == STACKED:
            raise UnsupportedCheckpoint(
                f"{name}: holds block scales of stacked experts in {header.file}, must be named "
                f"{names.block_scale}, with a {names.weight_global} beside them; leave "
                "--quantization out to let vLLM choose"
            )


def quantised_modules(headers: Mapping[str, TensorHeader], names: TensorNames) -> list[str]:
    """Names of the modules that hold NVFP4 codes, a weight's global scale, or both."""
    packed = [m for m in _modules(headers, names.weight) if _is_packed(headers, m, names)]
    return list(dict.fromkeys([*packed, *_modules(headers, names.weight_global)]))


def _is_packed(headers: Mapping[str, TensorHeader], module: str, names: TensorNames) -> bool:
    """Whether a module's weight is uint8 NVFP4 codes, not MXFP4, whose scales are uint8 too."""
    scale = headers.get(f"{module}.{names.block_scale}")
    is_mx = scale is not None and scale.dtype == "U8"
    return headers[f"{module}.{names.weight}"].dtype == "U8" and not is_mx


def _modules(headers: Mapping[str, TensorHeader], tensor: str) -> list[str]:
    suffix = f".{tensor}"
    return [name.removesuffix(suffix) for name in headers if name.endswith(suffix)]


def _check_module(
    headers: Mapping[str, TensorHeader], module: str, names: TensorNames, *, weight_only: bool
) -> None:
    needed = [names.weight, names.block_scale, names.weight_global]
    if not weight_only:
        needed.append(names.input_global)
    for tensor in needed:
        if f"{module}.{tensor}" not in headers:
            raise UnsupportedCheckpoint(
                f"{module}.{tensor}: is missing beside {module}'s other tensors; "
                "the checkpoint is incomplete, quantise the model again"
            )
    weight = headers[f"{module}.{names.weight}"]
    _check_tensor(f"{module}.{names.weight}", weight, "U8", None)
    if len(weight.shape) != 2:
        return  # experts stacked in one tensor; the layer that loads the stack validates it
    n, packed = weight.shape
    scale = headers[f"{module}.{names.block_scale}"]
    expected = (n, 2 * packed // BLOCK_SIZE)
    _check_tensor(f"{module}.{names.block_scale}", scale, "F8_E4M3", expected)
    for tensor in needed[2:]:
        header = headers[f"{module}.{tensor}"]
        _check_tensor(f"{module}.{tensor}", header, "F32", None)
        if math.prod(header.shape) != 1:
            raise UnsupportedCheckpoint(
                f"{header.file}: {module}.{tensor}: shape is {header.shape}, must be one number; "
                "quantise the model again with one global scale per tensor"
            )


def _check_tensor(
    name: str, header: TensorHeader, dtype: str, shape: tuple[int, ...] | None
) -> None:
    where = f"{header.file}: {name}"
    if header.dtype != dtype:
        raise UnsupportedCheckpoint(
            f"{where}: dtype is {header.dtype}, must be {dtype}; quantise the model again"
        )
    if shape is not None and header.shape != shape:
        raise UnsupportedCheckpoint(
            f"{where}: shape is {header.shape}, must be {shape}; quantise the model again"
        )


def _damaged(file: Path, what: str) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(f"{file}: {what}; copy or download the checkpoint again")
