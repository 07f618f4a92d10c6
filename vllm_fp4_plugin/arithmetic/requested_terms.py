"""User-requested number of NVFP4 terms per layer; see ``nvfp4_kernels.formats.terms``."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm_fp4_plugin.ignore import matches, shard_names
from vllm_fp4_plugin.options import KEY, ActivationTerms, InvalidOption

OPTION = "activation_terms"


@dataclass(frozen=True)
class RequestedTerms:
    """Number of NVFP4 terms that the user requested for a layer's activations.

    Attributes:
        count: number of terms, 1 to 4.
        reason: source of the request, for the report.
    """

    count: int
    reason: str


def requested_terms(
    option: ActivationTerms, name: str, packed_modules: Mapping[str, list[str]]
) -> RequestedTerms | None:
    """Find the number of terms requested for a layer; None: no request, the default applies.

    The first matching pattern wins. A fused layer is looked up shard by shard: a pattern may match
    the layer's name or the shard's.

    Args:
        option: the user's ``activation_terms``.
        name: name of the layer.
        packed_modules: last parts of the shards' names, by last part of the fused layer's name,
            e.g. ``qkv_proj``.

    Raises:
        InvalidOption: shards of a fused layer, which share their input, would get different
            numbers of terms.
    """
    if option is None:
        return None
    if isinstance(option, int):
        return RequestedTerms(option, f"{OPTION} is {option}")
    shards = shard_names(name, packed_modules)
    found = {shard: _first((name, shard), option) for shard in shards}
    if len({requested and requested.count for requested in found.values()}) > 1:
        each = ", ".join(f"{s} {g.count if g else 'the default'}" for s, g in found.items())
        raise InvalidOption(
            f"{KEY}.{OPTION}: gives shards of {name} several numbers ({each}), must give them one, "
            "as they share their input; name the fused layer, or all of its shards"
        )
    return found[shards[0]]


def _first(names: Iterable[str], option: Iterable[tuple[str, int]]) -> RequestedTerms | None:
    for pattern, count in option:
        if any(matches(name, [pattern]) is not None for name in names):
            return RequestedTerms(count, f"{OPTION} of {pattern!r} is {count}")
    return None
