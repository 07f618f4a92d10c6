"""Format of NVIDIA ModelOpt: tensor names, reader and writer of its config.

* ModelOpt 0.31 and later: ``config.json`` holds ``quantization_config`` with
  ``quant_method: "modelopt"``, ``quant_algo``, ``ignore`` and ``config_groups``.
* ModelOpt 0.29 and earlier: ``hf_quant_config.json`` holds ``quantization`` with ``quant_algo``,
  ``group_size``, ``exclude_modules`` and ``kv_cache_quant_algo``. Later versions also write this
  file.

Exporters mix the two: every field is read from the nested or the outer object, the list of 16-bit
modules from ``ignore`` and ``exclude_modules``. With ``quant_algo: MIXED_PRECISION``,
``quantized_layers`` lists the algorithm of each layer:
``{"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4"}, …}``.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from vllm_fp4_plugin import versions
from vllm_fp4_plugin.formats.config_groups import (
    check_any_nvfp4,
    check_block_size,
    is_nvfp4_cache,
    is_uniform,
    read_groups,
    read_kv_scheme,
)
from vllm_fp4_plugin.formats.fields import read_names, read_object, read_objects, read_text
from vllm_fp4_plugin.formats.format import (
    CheckpointConfig,
    Format,
    LayerGroup,
    TensorNames,
    UnsupportedCheckpoint,
)
from vllm_fp4_plugin.formats.kind import NVFP4_KINDS, Inputs, Kind

LEGACY_FILE = "hf_quant_config.json"

_W4A4, _W4A16, _MIXED = "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"
_KINDS = {
    _W4A4: Kind.NVFP4,
    _W4A16: Kind.NVFP4_A16,
    "FP8": Kind.FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": Kind.FP8_CHANNEL,
    "FP8_PB_WO": Kind.FP8_BLOCK,
    "FP8_BLOCK_SCALES": Kind.FP8_BLOCK,  # field name in some exports
    "MXFP8": Kind.MXFP8,
}
_ALGORITHMS = {kind: name for name, kind in reversed(_KINDS.items())}
_NESTED = ("quantization", "quantization_config")
_FP8_KV = {"dynamic": False, "num_bits": 8, "type": "float"}
_KV_SCHEMES = {"FP8": _FP8_KV, "NVFP4": {"num_bits": 4, "type": "float"}}
_PRODUCER = {"name": "vllm_fp4_plugin", "version": versions.PLUGIN}
_PRODUCERS = ("modelopt", _PRODUCER["name"])
_REMEDY = "serve it with --quantization modelopt or modelopt_mixed"


class ModelOpt(Format):
    """Format of ModelOpt, whose global scales are factors."""

    name = "modelopt"
    names = TensorNames(
        weight="weight",
        block_scale="weight_scale",
        weight_global="weight_scale_2",
        input_global="input_scale",
        k_scale="k_proj.k_scale",
        v_scale="v_proj.v_scale",
    )
    scalar = ()
    reciprocal = False
    scale_dims = MappingProxyType({Kind.FP8_CHANNEL: 1, Kind.FP8_BLOCK: 4})

    def wrote(self, config: Mapping[str, Any]) -> bool:
        method = str(config.get("quant_method") or "").lower()
        producer = config.get("producer")
        of_modelopt = isinstance(producer, Mapping) and producer.get("name") in _PRODUCERS
        return method.startswith("modelopt") or (not method and of_modelopt)

    def claims_nvfp4(self, config: Mapping[str, Any]) -> bool:
        try:
            parts = _parts(config)
            algorithm = _algorithm(parts)
            mixed = _mixed_groups(parts) if algorithm == _MIXED else []
        except UnsupportedCheckpoint:  # parse raises with the reason if our method is requested
            return False
        if algorithm != _MIXED:
            return algorithm in (_W4A4, _W4A16)
        return not mixed or any(group.kind.is_nvfp4 for group in mixed)

    def parse(self, config: Mapping[str, Any]) -> CheckpointConfig:
        parts = _parts(config)
        algorithm = _algorithm(parts)
        if algorithm not in (_W4A4, _W4A16, _MIXED):
            raise UnsupportedCheckpoint(
                f"quant_algo: is {_find(parts, 'quant_algo')!r}, must be {_W4A4}, {_W4A16} or "
                f"{_MIXED}; {_REMEDY}"
            )
        check_block_size("group_size", _find(parts, "group_size"))
        ignore, scheme = _ignore(parts), _kv_scheme(parts)
        nvfp4_cache = is_nvfp4_cache(scheme)
        scheme = read_kv_scheme(scheme)
        if algorithm == _MIXED or _find(parts, "quantized_layers") is not None:
            groups = _mixed_groups(parts)
            if groups:
                check_any_nvfp4("quantized_layers", groups, _REMEDY)
            # Without a list, the tensors determine each layer's scheme.
            return CheckpointConfig(
                self, True, ignore, None, scheme, tuple(groups), not groups, nvfp4_cache
            )
        groups = _config_groups(parts)
        if not is_uniform(groups):
            raise UnsupportedCheckpoint(
                f"config_groups: hold {', '.join(sorted({str(g.kind) for g in groups}))}, must "
                f"hold NVFP4 as quant_algo {algorithm} says, or quant_algo be {_MIXED}; export "
                "the checkpoint again"
            )
        weight_only = algorithm == _W4A16 or any(g.kind is Kind.NVFP4_A16 for g in groups)
        return CheckpointConfig(self, weight_only, ignore, None, scheme, nvfp4_cache=nvfp4_cache)

    def group(self, kind: Kind, *, static_input: bool) -> LayerGroup | None:
        if kind not in _ALGORITHMS:
            return None
        return _group("the headers", kind, None)

    def config(self, ignore: Sequence[str], *, weight_only: bool, fp8_kv: bool) -> dict[str, Any]:
        nvfp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}
        group = {
            "input_activations": None if weight_only else nvfp4,
            "weights": nvfp4,
            "targets": ["Linear"],
        }
        config = {
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
            "quant_algo": _W4A16 if weight_only else _W4A4,
            "producer": _PRODUCER,
            "quant_method": "modelopt",
        }
        return config | ({"kv_cache_scheme": _FP8_KV} if fp8_kv else {})

    def further_files(
        self, ignore: Sequence[str], *, weight_only: bool, fp8_kv: bool
    ) -> dict[str, dict[str, Any]]:
        quantization = {
            "quant_algo": _W4A16 if weight_only else _W4A4,
            "kv_cache_quant_algo": "FP8" if fp8_kv else None,
            "group_size": BLOCK_SIZE,
            "exclude_modules": list(ignore),
        }
        return {LEGACY_FILE: {"producer": _PRODUCER, "quantization": quantization}}


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Objects that may hold a config's fields: those nested in ``config``, then ``config``."""
    parts = [config]
    for name in _NESTED:
        if config.get(name) is not None:
            parts = [*_parts(read_object(name, config[name])), *parts]
    return parts


def _find(parts: Iterable[Mapping[str, Any]], name: str) -> Any:
    """Find a field; None if no part has this field."""
    return next((part[name] for part in parts if part.get(name) is not None), None)


def _algorithm(parts: Iterable[Mapping[str, Any]]) -> str:
    return read_text("quant_algo", _find(parts, "quant_algo")).upper()


def _ignore(parts: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Modules listed in ``ignore`` and ``exclude_modules``, without repetition."""
    found: dict[str, None] = {}
    for part in parts:
        for name in ("ignore", "exclude_modules"):
            found |= dict.fromkeys(map(_module, read_names(name, part.get(name))))
    return tuple(found)


def _module(pattern: str) -> str:
    """Rewrite ``X*`` as ``X``, which covers module X and all modules below, but not ``XY``.

    ModelOpt writes ``X*`` for a module X without any quantised layer. Other wildcards keep their
    usual meaning.
    """
    module = pattern.removesuffix("*")
    plain = not pattern.startswith("re:") and not any(c in module for c in "*?[")
    return module if plain and module and not module.endswith(".") else pattern


def _config_groups(parts: Iterable[Mapping[str, Any]]) -> list[LayerGroup]:
    return read_groups({"config_groups": _find(parts, "config_groups")}, _REMEDY)


def _of_modelopt(group: LayerGroup) -> LayerGroup:
    """Copy of a config group with the name of ModelOpt's algorithm as settings.

    Raises:
        UnsupportedCheckpoint: ``_ALGORITHMS`` has no algorithm for the group's scheme.
    """
    if group.kind not in _ALGORITHMS:
        raise UnsupportedCheckpoint(
            f"{group.where}: is {group.kind}, must be one of {', '.join(_ALGORITHMS)}; {_REMEDY}"
        )
    return _group(group.where, group.kind, group.targets)


def _mixed_groups(parts: list[Mapping[str, Any]]) -> list[LayerGroup]:
    """Groups of a mixed-precision checkpoint; [] if the config lists none."""
    layers = read_objects("quantized_layers", _find(parts, "quantized_layers"))
    if not layers:
        return [_of_modelopt(group) for group in _config_groups(parts)]
    targets: dict[Kind, list[str]] = {}
    for name, layer in layers.items():
        field = f"quantized_layers.{name}"
        algorithm = read_text(f"{field}.quant_algo", layer.get("quant_algo")).upper()
        kind = _KINDS.get(algorithm)
        if kind is None:
            raise UnsupportedCheckpoint(
                f"{field}.quant_algo: is {layer.get('quant_algo')!r}, must be "
                f"{', '.join(_KINDS)}; {_REMEDY}"
            )
        if kind in NVFP4_KINDS:
            check_block_size(f"{field}.group_size", layer.get("group_size"))
        targets.setdefault(kind, []).append(name)
    return [_group("quantized_layers", kind, tuple(names)) for kind, names in targets.items()]


def _group(where: str, kind: Kind, targets: tuple[str, ...] | None) -> LayerGroup:
    settings = {"quant_algo": _ALGORITHMS[kind]}
    inputs: Inputs = "static" if kind is Kind.FP8 else "dynamic"
    return LayerGroup(where, kind, targets, settings, inputs)


def _kv_scheme(parts: list[Mapping[str, Any]]) -> Any:
    """Scheme of the KV cache: ``kv_cache_scheme``, else by ``kv_cache_quant_algo``, else None."""
    algorithm, scheme = _find(parts, "kv_cache_quant_algo"), _find(parts, "kv_cache_scheme")
    if scheme is not None or algorithm is None:
        return scheme
    if str(algorithm).upper() not in _KV_SCHEMES:
        raise UnsupportedCheckpoint(
            f"kv_cache_quant_algo: is {algorithm!r}, must be {', '.join(_KV_SCHEMES)} or absent; "
            "export the checkpoint with an FP8 KV cache or none"
        )
    return _KV_SCHEMES[str(algorithm).upper()]
