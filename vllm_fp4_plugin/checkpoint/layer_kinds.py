"""Quantization schemes of the layers that vLLM builds: from stored tensors, else the config."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm_fp4_plugin.checkpoint.files import TensorHeader
from vllm_fp4_plugin.checkpoint.kinds_declared import UNQUANTIZED, DeclaredKinds, renamed_module
from vllm_fp4_plugin.checkpoint.kinds_stored import StoredKind, find_kinds
from vllm_fp4_plugin.formats import CheckpointConfig, LayerGroup, UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.ignore import MixedShards, shard_names

# Name parts of modules whose 16-bit layers exporters omit from their ignore lists.
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
    """Quantization scheme of a layer.

    Attributes:
        group: group that the layer belongs to.
        reason: reason why the layer is in 16 bits, or in another scheme than the config says, for
            the report; may be empty.
    """

    group: LayerGroup
    reason: str


class LayerKinds:
    """Quantization schemes of a checkpoint's layers, looked up by vLLM's layer names.

    Every process receives a copy, so only one entry per layer is kept from the files.

    Args:
        checkpoint: content of the checkpoint's config.
    """

    def __init__(self, checkpoint: CheckpointConfig) -> None:
        self._checkpoint = checkpoint
        self._declared = DeclaredKinds(checkpoint)
        self._found: dict[str, StoredKind] = {}

    def read(self, headers: Mapping[str, TensorHeader]) -> None:
        """Read the schemes from the headers of a local checkpoint.

        Raises:
            UnsupportedCheckpoint: see ``find_kinds``.
        """
        self._found = find_kinds(headers, self._checkpoint)

    def rename(self, mapper: Any) -> None:
        """Add the layer names that vLLM's ``mapper`` gives; rename the config's patterns.

        A nested model has a mapper of its own, which is applied second and may not cover names from
        the first mapper: the layers' earlier names stay valid.
        """
        self._declared.rename(mapper)
        self._found |= {renamed_module(name, mapper): f for name, f in self._found.items()}

    def has(self, kind: Kind) -> bool:
        """Whether any layer has scheme ``kind``; if the layers are unknown, any config group."""
        groups = [f.group for f in self._found.values()] or list(self._checkpoint.declared)
        return any(group.kind is kind for group in groups)

    @property
    def are_by_tensors(self) -> bool:
        """Whether the schemes come from the checkpoint's tensors."""
        return bool(self._found)

    def has_beside(self, name: str) -> bool:
        """Whether the checkpoint has the module ``name``, or another module of the same parent."""
        parent = name.rpartition(".")[0]
        return any(found.rpartition(".")[0] == parent for found in self._found)

    def tensors_kind(self, name: str) -> Kind | None:
        """Scheme of a module from its tensors; None if the tensors are unknown."""
        found = self._found.get(name)
        return None if found is None else found.group.kind

    def embedding_name(self, prefix: str) -> str:
        """Name of the embedding: ``prefix`` if not empty, else the name in the checkpoint.

        ``""`` if that name is unknown.
        """
        named = (name for name in self._found if name.rpartition(".")[2] == EMBEDDING)
        return prefix or next(named, "")

    def head_group(self, prefix: str) -> LayerGroup | None:
        """Group of an ``lm_head`` from its tensors; None without tensors.

        If the checkpoint has no module ``prefix``, a module whose name has the same last part is
        used.
        """
        last = prefix.rpartition(".")[2]
        names = [prefix, *(name for name in self._found if name.rpartition(".")[2] == last)]
        return next((self._found[name].group for name in names if name in self._found), None)

    def of(self, prefix: str, packed_modules: Mapping[str, list[str]]) -> LayerKind:
        """Scheme of a linear layer.

        Args:
            prefix: name of the layer.
            packed_modules: shards of fused layers, by the last part of the layer's name.

        Raises:
            MixedShards: the shards have several schemes.
            UnsupportedCheckpoint: neither tensors nor config specify a scheme.
        """
        names = shard_names(prefix, packed_modules)
        found = {name: self._found[name] for name in [*names, prefix] if name in self._found}
        if found:
            return self._by_tensors(prefix, found)
        if self._is_unlisted(prefix):
            return LayerKind(UNQUANTIZED, _UNLISTED)
        queried = [prefix] if self._declared.mentions(prefix) else names
        groups = {name: self._declared.group_of(name) for name in queried}
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
        """Scheme of a layer of experts.

        Args:
            prefix: name of the layer.
            count: number of experts.
            projections: names of an expert's projections, e.g. ``gate_proj``.

        Raises:
            UnsupportedCheckpoint: experts have several schemes or none, or the checkpoint has more
                experts than ``count``.
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
            return self.of(prefix, {})  # raises with the name of the missing tensor or field
        reason = self._reason(f"{prefix}.{first[0]}", first[1], None)
        return LayerKind(first[1], reason)

    def _only_experts_beside(self, prefix: str) -> str | None:
        """Checkpoint name of experts whose parent module vLLM names differently; None if unknown.

        MiniMax-M2 has ``layers.0.block_sparse_moe.experts`` on disk.
        """
        decoder_layer, last = prefix.split(".")[:-2], prefix.rpartition(".")[2]
        names = [
            name
            for name in self._found
            if name.endswith(f".{last}") and name.split(".")[:-2] == decoder_layer
        ]
        return names[0] if len(names) == 1 else None

    def _by_tensors(self, prefix: str, found: Mapping[str, StoredKind]) -> LayerKind:
        _check_alike(prefix, {name: each.group for name, each in found.items()})
        group = next(iter(found.values())).group
        differing = [(n, f.config_says) for n, f in found.items() if f.config_says is not None]
        name, says = differing[0] if differing else (next(iter(found)), None)
        return LayerKind(group, self._reason(name, group, says))

    def _is_unlisted(self, prefix: str) -> bool:
        """Whether a layer without tensors of its name belongs to a vision tower in 16 bits.

        Vision models rename tensors in their own loaders, so a layer's checkpoint name is unknown.
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
