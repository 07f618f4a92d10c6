"""Checks of what both formats' configs have in common: config groups and KV-cache schemes."""

from collections.abc import Mapping
from typing import Any

from nvfp4_kernels.nvfp4 import BLOCK_SIZE
from vllm_fp4_plugin.formats.format import UnsupportedCheckpoint

Groups = dict[str, Mapping[str, Any]]


def read_groups(config: Mapping[str, Any], remedy: str) -> Groups:
    """Read ``config_groups``, whose weights must be NVFP4; {} if there are none.

    Args:
        config: the quantization config.
        remedy: what to do about a checkpoint in another format.

    Raises:
        UnsupportedCheckpoint: they are no objects, or their weights are in another format.
    """
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        raise UnsupportedCheckpoint(
            f"config_groups: is {groups!r}, must be an object of groups; export the model again"
        )
    for name, group in groups.items():
        _check_nvfp4(f"config_groups.{name}.weights", group.get("weights"), remedy)
    return dict(groups)


def read_weight_only(groups: Groups, remedy: str) -> bool:
    """Whether no group quantises activations.

    Raises:
        UnsupportedCheckpoint: some do and others do not, or in another format than NVFP4.
    """
    without = []
    for name, group in groups.items():
        inputs = group.get("input_activations")
        if inputs is None:
            without.append(name)
        else:
            _check_nvfp4(f"config_groups.{name}.input_activations", inputs, remedy)
    if without and len(without) < len(groups):
        raise UnsupportedCheckpoint(
            f"config_groups: {', '.join(without)} quantise weights only, the others activations "
            f"too, must be one or the other for a whole model; {remedy}"
        )
    return bool(without)


def _check_nvfp4(field: str, args: Any, remedy: str) -> None:
    if not isinstance(args, Mapping):
        raise UnsupportedCheckpoint(
            f"{field}: is {args!r}, must be an object that describes 4-bit floats; {remedy}"
        )
    if args.get("num_bits") != 4 or args.get("type") != "float":
        raise UnsupportedCheckpoint(
            f"{field}: is {args.get('num_bits')}-bit {args.get('type')}, must be 4-bit float; "
            f"{remedy}"
        )
    check_block_size(f"{field}.group_size", args.get("group_size"))


def check_block_size(field: str, size: Any) -> None:
    """Raise unless ``size`` is NVFP4's, or not given."""
    if size is not None and size != BLOCK_SIZE:
        raise UnsupportedCheckpoint(
            f"{field}: is {size}, must be {BLOCK_SIZE} for NVFP4; quantise the model again"
        )


def read_kv_scheme(scheme: Any) -> dict[str, Any] | None:
    """Read a ``kv_cache_scheme``, which must be FP8; None if there is none.

    Raises:
        UnsupportedCheckpoint: it is another one.
    """
    if scheme is None:
        return None
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
