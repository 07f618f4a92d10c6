"""Readers of the config parts shared by both formats: config groups and KV-cache schemes."""

from collections.abc import Mapping
from typing import Any

from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from vllm_fp4_plugin.formats.fields import read_names, read_object, read_objects
from vllm_fp4_plugin.formats.format import LayerGroup, UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import FP8_BLOCK_SIZE, MX_BLOCK_SIZE, Inputs, Kind

EVERY_LINEAR = "Linear"  # target that names a class, not a module

_BY_STRATEGY = {
    None: Kind.FP8,
    "tensor": Kind.FP8,
    "channel": Kind.FP8_CHANNEL,
    "block": Kind.FP8_BLOCK,
}
_ACCEPTED = "must be 4-bit float (NVFP4, MXFP4) or 8-bit float (FP8, MXFP8)"


def read_groups(config: Mapping[str, Any], remedy: str) -> list[LayerGroup]:
    """Read ``config_groups``; [] if there are none.

    A group that targets only attention is skipped: it describes a KV cache, as
    ``kv_cache_scheme`` does.

    Args:
        config: the quantization config.
        remedy: advice that ends the message about an unsupported group.

    Raises:
        UnsupportedCheckpoint: a field has a wrong type, or the scheme of a group's weights or
            activations is not supported.
    """
    found = []
    for name, group in read_objects("config_groups", config.get("config_groups")).items():
        field = f"config_groups.{name}"
        targets = read_names(f"{field}.targets", group.get("targets"))
        if len(targets) == 1 and targets[0].endswith("Attention"):
            continue
        weights, inputs = group.get("weights"), group.get("input_activations")
        kind = _kind(f"{field}.weights", weights, remedy)
        _check_inputs(f"{field}.input_activations", kind, inputs, remedy)
        if kind is Kind.NVFP4 and inputs is None:
            kind = Kind.NVFP4_A16
        named = None if EVERY_LINEAR in targets else targets
        found.append(LayerGroup(field, kind, named, group, input_scaling(kind, inputs)))
    return found


def input_scaling(kind: Kind, inputs: Mapping[str, Any] | None) -> Inputs:
    """Input scaling of a layer of scheme ``kind``; for NVFP4 ``"16-bit"``, which is not used.

    ``inputs``: the group's ``input_activations``; None: inputs are not quantised.
    """
    if inputs is None or kind.is_nvfp4:
        return "16-bit"
    static = kind in (Kind.FP8, Kind.FP8_CHANNEL) and not inputs.get("dynamic")
    return "static" if static else "dynamic"


def is_uniform(groups: list[LayerGroup]) -> bool:
    """Whether all ``groups`` are NVFP4, or all NVFP4 weight-only; True without groups."""
    kinds = {group.kind for group in groups}
    return len(kinds) <= 1 and all(kind.is_nvfp4 for kind in kinds)


def check_any_nvfp4(field: str, groups: list[LayerGroup], remedy: str) -> None:
    """Raise unless at least one group is NVFP4."""
    if not any(group.kind.is_nvfp4 for group in groups):
        kinds = ", ".join(sorted({str(group.kind) for group in groups}))
        holds = f"holds {kinds} alone" if kinds else "describes no layers"
        raise UnsupportedCheckpoint(
            f"{field}: {holds}, must hold NVFP4 layers for nvfp4-tc; {remedy}"
        )


def _kind(field: str, args: Any, remedy: str) -> Kind:
    """Scheme of a group by its field ``weights``; ``Kind.NVFP4`` also for NVFP4 weight-only."""
    if not isinstance(args, Mapping):
        raise UnsupportedCheckpoint(
            f"{field}: is {args!r}, must be an object that describes 4-bit or 8-bit floats; "
            f"{remedy}"
        )
    bits, size, strategy = args.get("num_bits"), args.get("group_size"), args.get("strategy")
    if args.get("type") != "float" or bits not in (4, 8):
        raise UnsupportedCheckpoint(
            f"{field}: is {bits}-bit {args.get('type')}, {_ACCEPTED}; {remedy}"
        )
    if bits == 4:
        if strategy == "group" and size == MX_BLOCK_SIZE:
            return Kind.MXFP4
        check_block_size(f"{field}.group_size", size)
        _check_blocks(field, args, remedy)
        return Kind.NVFP4
    if strategy in (None, "group") and size == MX_BLOCK_SIZE:
        return Kind.MXFP8
    block = args.get("block_structure")
    if strategy not in _BY_STRATEGY or (strategy is None and size is not None):
        raise UnsupportedCheckpoint(
            f"{field}.strategy: is {strategy!r} with groups of {size} for 8-bit floats, must be "
            f"'tensor', 'channel', 'block' or groups of {MX_BLOCK_SIZE}; {remedy}"
        )
    if strategy == "block" and block != [FP8_BLOCK_SIZE] * 2:
        raise UnsupportedCheckpoint(
            f"{field}.block_structure: is {block!r}, must be {[FP8_BLOCK_SIZE] * 2}; {remedy}"
        )
    return _BY_STRATEGY[strategy]


def _check_inputs(field: str, kind: Kind, inputs: Any, remedy: str) -> None:
    """Raise unless activations are unquantised, or floats as wide as the weights.

    With NVFP4 weights, quantised activations must be NVFP4.
    """
    if inputs is None:
        return
    args = read_object(field, inputs)
    bits = 4 if kind.family in ("nvfp4", "mxfp4") else 8
    if args.get("num_bits") != bits or args.get("type") != "float":
        raise UnsupportedCheckpoint(
            f"{field}: is {args.get('num_bits')}-bit {args.get('type')}, must be {bits}-bit float "
            f"or absent beside {kind} weights; {remedy}"
        )
    if kind.is_nvfp4:
        check_block_size(f"{field}.group_size", args.get("group_size"))
        _check_blocks(field, args, remedy)


def _check_blocks(field: str, args: Mapping[str, Any], remedy: str) -> None:
    """Raise if a declared ``strategy`` or ``symmetric`` field does not match NVFP4."""
    for name, accepted in (("strategy", ("tensor_group", "group")), ("symmetric", (True,))):
        value = args.get(name)
        if value is not None and value not in accepted:
            must = " or ".join(map(repr, accepted))
            raise UnsupportedCheckpoint(
                f"{field}.{name}: is {value!r}, must be {must} for NVFP4; {remedy}"
            )


def check_block_size(field: str, size: Any) -> None:
    """Raise unless ``size`` is NVFP4's block size, or absent."""
    if size is not None and size != BLOCK_SIZE:
        raise UnsupportedCheckpoint(
            f"{field}: is {size}, must be {BLOCK_SIZE} for NVFP4; quantise the model again"
        )


def is_nvfp4_cache(scheme: Any) -> bool:
    """Whether a ``kv_cache_scheme`` declares an NVFP4 cache."""
    return (
        isinstance(scheme, Mapping)
        and scheme.get("num_bits") == 4
        and scheme.get("type") == "float"
        and scheme.get("group_size") in (None, BLOCK_SIZE)
    )


def read_kv_scheme(scheme: Any) -> dict[str, Any] | None:
    """Read an FP8 ``kv_cache_scheme``; None if the scheme is NVFP4, or absent.

    Raises:
        UnsupportedCheckpoint: the scheme is neither FP8 with a static scale per tensor, nor NVFP4.
    """
    if scheme is None or is_nvfp4_cache(scheme):
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
            "tensor, or NVFP4; export the checkpoint with such a scheme or none"
        )
    return dict(scheme)
