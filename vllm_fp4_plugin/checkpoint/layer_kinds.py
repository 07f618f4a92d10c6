"""Kind of every layer that vLLM builds: by its tensors where they are known, else by the config."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm_fp4_plugin.checkpoint.files import TensorHeader
from vllm_fp4_plugin.checkpoint.kinds_declared import UNQUANTIZED, DeclaredKinds, renamed_module
from vllm_fp4_plugin.checkpoint.kinds_stored import Found, find_kinds
from vllm_fp4_plugin.formats import CheckpointConfig, LayerGroup, UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.ignore import MixedShards, shard_names

# Parts of a name below which exporters left out of their lists what they did not quantise.
UNLISTED = frozenset(
    {
        "mm_projector",
        "multi_modal_projector",
        "vision_encoder",
        "vision_model",
        "vision_tower",
        "visual",
        "vit_large_projector",
    }
)


_UNLISTED = "left out of the checkpoint's list"


EMBEDDING = "embed_tokens"


class LayerKind(NamedTuple):
    """Kind of a layer.

    Attributes:
        group: group that it belongs to.
        reason: reason for the kind, for the report; empty if config and tensors agree on one.
    """

    group: LayerGroup
    reason: str


class LayerKinds:
    """Kinds of a checkpoint's layers, asked by the names that vLLM gives them.

    It is sent to every process: what is kept of the files is one entry a layer.

    Args:
        checkpoint: content of its config.
    """

    def __init__(self, checkpoint: CheckpointConfig) -> None:
        self._checkpoint = checkpoint
        self._declared = DeclaredKinds(checkpoint)
        self._found: dict[str, Found] = {}

    def read(self, headers: Mapping[str, TensorHeader]) -> None:
        """Take the kinds from the headers of a local checkpoint.

        Raises:
            UnsupportedCheckpoint: see ``find_kinds``.
        """
        self._found = find_kinds(headers, self._checkpoint)

    def rename(self, mapper: Any) -> None:
        """Know the layers by the names that vLLM's ``mapper`` gives them, too.

        A model within another has a mapper of its own, which comes second and may not know the
        names that the first one gave: those of before stay known.
        """
        self._declared.rename(mapper)
        self._found |= {renamed_module(name, mapper): f for name, f in self._found.items()}

    def has(self, kind: Kind) -> bool:
        """Whether a layer, or a group where layers are not known, is of a kind."""
        groups = [f.group for f in self._found.values()] or list(self._checkpoint.declared)
        return any(group.kind is kind for group in groups)

    @property
    def are_by_tensors(self) -> bool:
        """Whether the checkpoint's tensors were at hand."""
        return bool(self._found)

    def has_beside(self, name: str) -> bool:
        """Whether the checkpoint's tensors are of modules beside one of that name, or of it."""
        parent = name.rpartition(".")[0]
        return any(found.rpartition(".")[0] == parent for found in self._found)

    def tensors_kind(self, name: str) -> Kind | None:
        """Kind of a module by its tensors; None if it has none, or they are not known."""
        found = self._found.get(name)
        return None if found is None else found.group.kind

    def embedding_name(self, prefix: str) -> str:
        """Name of an embedding, which some models build without one."""
        named = (name for name in self._found if name.rpartition(".")[2] == EMBEDDING)
        return prefix or next(named, "")

    def head_group(self, prefix: str) -> LayerGroup | None:
        """Group of an ``lm_head`` by its tensors, whatever is before its name; None without any."""
        last = prefix.rpartition(".")[2]
        names = [prefix, *(name for name in self._found if name.rpartition(".")[2] == last)]
        return next((self._found[name].group for name in names if name in self._found), None)

    def of(self, prefix: str, packed_modules: Mapping[str, list[str]]) -> LayerKind:
        """Kind of a linear layer.

        Args:
            prefix: the layer's name.
            packed_modules: shards of fused layers.

        Raises:
            MixedShards: its shards are of several kinds.
            UnsupportedCheckpoint: neither tensors nor config say what it is.
        """
        names = shard_names(prefix, packed_modules)
        found = {name: self._found[name] for name in [*names, prefix] if name in self._found}
        if found:
            return self._by_tensors(prefix, found)
        if self._is_unlisted(prefix):
            return LayerKind(UNQUANTIZED, _UNLISTED)
        asked = [prefix] if self._declared.mentions(prefix) else names
        groups = {name: self._declared.group_of(name) for name in asked}
        _check_alike(prefix, groups)
        group = next(iter(groups.values()))
        if group is None:
            raise UnsupportedCheckpoint(
                f"{prefix}: the config says MIXED_PRECISION, but not what this layer is, and its "
                "tensors are not at hand, one of which must be; download the checkpoint and "
                "serve its directory"
            )
        return LayerKind(group, self._reason(next(iter(groups)), group, None))

    def of_experts(self, prefix: str, count: int, projections: Sequence[str]) -> LayerKind:
        """Kind of a layer of experts.

        Args:
            prefix: the layer's name.
            count: experts that it has.
            projections: names of an expert's projections, e.g. ``gate_proj``.

        Raises:
            UnsupportedCheckpoint: experts are of several kinds, nothing says of which, or there are
                more of them on disk.
        """
        name = prefix if prefix in self._found else self._only_experts_beside(prefix)
        if name is not None:
            found = self._found[name]
            if found.experts > count:
                raise UnsupportedCheckpoint(
                    f"{prefix}: has {found.experts} experts in the checkpoint, must have {count} "
                    "as config.json says; mend that, or export the model again"
                )
            return self._by_tensors(prefix, {name: found})
        if self._declared.mentions(prefix):
            return self.of(prefix, {})
        first: tuple[str, LayerGroup | None] | None = None
        for projection in (f"{expert}.{each}" for expert in range(count) for each in projections):
            group = self._declared.group_of(f"{prefix}.{projection}")
            first = first or (projection, group)
            if _way(group) != _way(first[1]):
                raise UnsupportedCheckpoint(
                    f"{prefix}: {first[0]} is {_called(first[1])}, {projection} is "
                    f"{_called(group)}; experts of a layer must be quantised in one way or not at "
                    "all, so quantise the model with one format for all of them"
                )
        if first is None or first[1] is None:
            return self.of(prefix, {})  # which says what is missing
        reason = self._reason(f"{prefix}.{first[0]}", first[1], None)
        return LayerKind(first[1], reason)

    def _only_experts_beside(self, prefix: str) -> str | None:
        """Name of the experts of a decoder layer, where the checkpoint calls their module else.

        MiniMax-M2 has ``layers.0.block_sparse_moe.experts`` on disk.
        """
        decoder_layer, last = prefix.split(".")[:-2], prefix.rpartition(".")[2]
        names = [
            name
            for name in self._found
            if name.endswith(f".{last}") and name.split(".")[:-2] == decoder_layer
        ]
        return names[0] if len(names) == 1 else None

    def _by_tensors(self, prefix: str, found: Mapping[str, Found]) -> LayerKind:
        _check_alike(prefix, {name: each.group for name, each in found.items()})
        group = next(iter(found.values())).group
        differing = [(n, f.config_says) for n, f in found.items() if f.config_says is not None]
        name, says = differing[0] if differing else (next(iter(found)), None)
        return LayerKind(group, self._reason(name, group, says))

    def _is_unlisted(self, prefix: str) -> bool:
        """Whether a layer is in a tower of 16-bit layers, though none has just that name.

        Vision models rename what they load themselves.
        """
        parts = UNLISTED.intersection(prefix.split("."))
        kinds = {
            found.group.kind
            for name, found in self._found.items()
            if not parts.isdisjoint(name.split("."))
        }
        return kinds == {Kind.UNQUANTIZED}

    def _reason(self, name: str, group: LayerGroup, says: Kind | None) -> str:
        if says is not None:
            if group.kind is Kind.UNQUANTIZED and not UNLISTED.isdisjoint(name.split(".")):
                return _UNLISTED
            return f"{group.kind} in the checkpoint, whose config says {says}"
        if group.kind is not Kind.UNQUANTIZED:
            return ""
        pattern = self._declared.ignored_by(name)
        if pattern is not None:
            return f"ignored by {pattern!r}"
        return "" if self._checkpoint.is_silent else "no target of the checkpoint"


def _check_alike(prefix: str, groups: Mapping[str, LayerGroup | None]) -> None:
    """Raise unless all shards of a layer are quantised in one way."""
    if len({_way(group) for group in groups.values()}) > 1:
        each = ", ".join(
            f"{name.rpartition('.')[2]} is {_called(group)}" for name, group in groups.items()
        )
        raise MixedShards(
            f"{prefix}: {each}; a fused layer is quantised whole in one way or not at all, so "
            "quantise the model with one format for all of them"
        )


def _way(group: LayerGroup | None) -> tuple[Kind, str, str] | None:
    return None if group is None else group.way


def _called(group: LayerGroup | None) -> str:
    return group.called if group else "unknown"
