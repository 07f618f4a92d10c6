"""What a checkpoint's quantization config says, for the NVFP4 formats that producers write.

* NVIDIA ModelOpt 0.31 and later: ``config.json`` holds ``quantization_config`` with
  ``quant_method: "modelopt"``, ``quant_algo``, ``ignore`` and ``config_groups``.
* ModelOpt 0.29 and earlier: ``hf_quant_config.json`` holds ``quantization`` with ``quant_algo``,
  ``group_size``, ``exclude_modules`` and ``kv_cache_quant_algo``.
* compressed-tensors (llm-compressor): ``format: "nvfp4-pack-quantized"`` and ``config_groups``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nvfp4_kernels.nvfp4 import BLOCK_SIZE
from vllm_fp4_plugin.ignore import InvalidPattern, check_pattern

Producer = Literal["modelopt", "compressed-tensors"]

_MODELOPT_ALGOS = ("NVFP4", "W4A16_NVFP4")
_CT_FORMAT = "nvfp4-pack-quantized"


class UnsupportedCheckpoint(ValueError):
    """A checkpoint that ``nvfp4-tc`` cannot serve as it is."""


@dataclass(frozen=True)
class TensorNames:
    """Names of a quantised linear's tensors on disk.

    Attributes:
        weight: uint8 ``(N, K/2)``.
        block_scale: float8_e4m3fn ``(N, K/16)``.
        weight_global: float32, one number.
        input_global: float32, one number; absent in weight-only checkpoints.
        reciprocal: whether the two globals are divisors (2688/amax) instead of factors.
    """

    weight: str
    block_scale: str
    weight_global: str
    input_global: str
    reciprocal: bool


TENSOR_NAMES: dict[Producer, TensorNames] = {
    "modelopt": TensorNames("weight", "weight_scale", "weight_scale_2", "input_scale", False),
    "compressed-tensors": TensorNames(
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", True
    ),
}


@dataclass(frozen=True)
class CheckpointFormat:
    """How an NVFP4 checkpoint is laid out.

    Attributes:
        producer: whose conventions it follows.
        weight_only: activations stay in 16 bits (W4A16).
        ignore: patterns of modules left unquantised (see ``ignore.matches``).
        targets: patterns of modules that are quantised, None for every linear.
        kv_cache_scheme: the FP8 KV-cache scheme it declares, None without one.
    """

    producer: Producer
    weight_only: bool
    ignore: tuple[str, ...] = ()
    targets: tuple[str, ...] | None = None
    kv_cache_scheme: dict[str, Any] | None = None

    @property
    def names(self) -> TensorNames:
        """Names of a quantised linear's tensors."""
        return TENSOR_NAMES[self.producer]


def is_nvfp4(config: Mapping[str, Any]) -> bool:
    """Whether a quantization config claims one of the NVFP4 formats; it may still be refused."""
    if _is_modelopt(config):
        inner = config.get("quantization", config)
        return "NVFP4" in str(inner.get("quant_algo", "")).upper()
    return _is_compressed_tensors(config) and config.get("format") == _CT_FORMAT


def parse(config: Mapping[str, Any]) -> CheckpointFormat:
    """Read a quantization config.

    Raises:
        UnsupportedCheckpoint: naming the field, what it holds, what is accepted, and what to do.
    """
    if _is_modelopt(config):
        return _checked(_parse_modelopt(config))
    if _is_compressed_tensors(config):
        return _checked(_parse_compressed_tensors(config))
    raise UnsupportedCheckpoint(
        f"quant_method: is {config.get('quant_method')!r}, nvfp4-tc reads 'modelopt' and "
        "'compressed-tensors' NVFP4 checkpoints and unquantised ones; "
        "leave --quantization out to let vLLM choose"
    )


def _checked(found: CheckpointFormat) -> CheckpointFormat:
    for field, patterns in (("ignore", found.ignore), ("targets", found.targets or ())):
        for pattern in patterns:
            try:
                check_pattern(field, pattern)
            except InvalidPattern as error:
                raise UnsupportedCheckpoint(f"{error}, in the checkpoint's config") from error
    return found


def _is_modelopt(config: Mapping[str, Any]) -> bool:
    method = str(config.get("quant_method", "")).lower()
    producer = config.get("producer")
    by_modelopt = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    return method.startswith("modelopt") or (not method and by_modelopt)


def _is_compressed_tensors(config: Mapping[str, Any]) -> bool:
    method = str(config.get("quant_method", "")).lower().replace("_", "-")
    return method == "compressed-tensors"


def _parse_modelopt(config: Mapping[str, Any]) -> CheckpointFormat:
    legacy = "quantization" in config
    inner = config["quantization"] if legacy else config
    algo = str(inner.get("quant_algo", "")).upper()
    if algo not in _MODELOPT_ALGOS or "quantized_layers" in inner:
        raise UnsupportedCheckpoint(
            f"quant_algo: is {inner.get('quant_algo')!r}, nvfp4-tc reads "
            f"{' and '.join(_MODELOPT_ALGOS)} for a whole model; serve it with "
            "--quantization modelopt or modelopt_mixed"
        )
    groups = _groups(config)
    _check_block_size("group_size", inner.get("group_size"))
    for name, group in groups.items():
        _check_nvfp4_args(f"config_groups.{name}.weights", group.get("weights"))
    weight_only = algo == "W4A16_NVFP4" or (bool(groups) and _weight_only(groups))
    ignore = inner.get("exclude_modules" if legacy else "ignore") or ()
    return CheckpointFormat(
        "modelopt", weight_only, tuple(ignore), None, _modelopt_kv_scheme(inner)
    )


def _modelopt_kv_scheme(inner: Mapping[str, Any]) -> dict[str, Any] | None:
    scheme = inner.get("kv_cache_scheme")
    if scheme is not None:
        return _check_kv_scheme(scheme)
    algo = inner.get("kv_cache_quant_algo")
    if algo is None:
        return None
    if str(algo).upper() != "FP8":
        raise UnsupportedCheckpoint(
            f"kv_cache_quant_algo: is {algo!r}, must be FP8 or absent; "
            "export the checkpoint with an FP8 KV cache or none"
        )
    return {"num_bits": 8, "type": "float", "dynamic": False}


def _parse_compressed_tensors(config: Mapping[str, Any]) -> CheckpointFormat:
    groups = _groups(config)
    formats = {config.get("format")} | {g["format"] for g in groups.values() if g.get("format")}
    if formats != {_CT_FORMAT}:
        raise UnsupportedCheckpoint(
            f"format: is {', '.join(sorted(map(str, formats)))}, nvfp4-tc reads {_CT_FORMAT} for "
            "every config group; serve it with --quantization compressed-tensors"
        )
    for field in ("sparsity_config", "transform_config"):
        if config.get(field):
            raise UnsupportedCheckpoint(
                f"{field}: is set, nvfp4-tc reads checkpoints without it; "
                "serve it with --quantization compressed-tensors"
            )
    targets: list[str] = []
    for name, group in groups.items():
        _check_nvfp4_args(f"config_groups.{name}.weights", group.get("weights"))
        targets += group.get("targets") or ()
    if not targets:
        raise UnsupportedCheckpoint(
            "config_groups: names no targets, must say which layers are quantised; "
            "export the checkpoint again"
        )
    kv_scheme = config.get("kv_cache_scheme")
    return CheckpointFormat(
        "compressed-tensors",
        _weight_only(groups),
        tuple(config.get("ignore") or ()),
        None if "Linear" in targets else tuple(targets),
        None if kv_scheme is None else _check_kv_scheme(kv_scheme),
    )


def _groups(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        raise UnsupportedCheckpoint(
            f"config_groups: is {groups!r}, must be an object of groups; export the model again"
        )
    return dict(groups)


def _weight_only(groups: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether no group quantises activations; refuses a mixture."""
    for name, group in groups.items():
        if group.get("input_activations") is not None:
            _check_nvfp4_args(f"config_groups.{name}.input_activations", group["input_activations"])
    without = [n for n, g in groups.items() if g.get("input_activations") is None]
    if without and len(without) < len(groups):
        raise UnsupportedCheckpoint(
            f"config_groups: {', '.join(without)} quantise weights only, the others activations "
            "too; nvfp4-tc reads one or the other for a whole model"
        )
    return bool(without)


def _check_nvfp4_args(field: str, args: Any) -> None:
    if not isinstance(args, Mapping):
        raise UnsupportedCheckpoint(f"{field}: is {args!r}, must describe 4-bit floats")
    if args.get("num_bits") != 4 or args.get("type") != "float":
        raise UnsupportedCheckpoint(
            f"{field}: is {args.get('num_bits')}-bit {args.get('type')}, must be 4-bit float; "
            "serve it with --quantization compressed-tensors"
        )
    _check_block_size(f"{field}.group_size", args.get("group_size"))


def _check_block_size(field: str, size: Any) -> None:
    if size is not None and size != BLOCK_SIZE:
        raise UnsupportedCheckpoint(
            f"{field}: is {size}, must be {BLOCK_SIZE} for NVFP4; quantise the model again"
        )


def _check_kv_scheme(scheme: Any) -> dict[str, Any]:
    fp8 = (
        isinstance(scheme, Mapping)
        and scheme.get("num_bits") == 8
        and scheme.get("type") == "float"
        and not scheme.get("dynamic")
        and scheme.get("strategy", "tensor") == "tensor"
    )
    if not fp8:
        raise UnsupportedCheckpoint(
            f"kv_cache_scheme: is {scheme!r}, must be 8-bit float with one static scale per "
            "tensor; export the checkpoint with such a scheme or none"
        )
    return dict(scheme)
