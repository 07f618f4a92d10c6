"""Interface of a checkpoint format, and the content of a config in it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nvfp4_kernels.formats.nvfp4 import Convention
from vllm_fp4_plugin.formats.kind import Inputs, Kind
from vllm_fp4_plugin.ignore import InvalidPattern, check_pattern

SCALE = "weight_scale"
INVERSE_SCALE = "weight_scale_inv"  # DeepSeek's name for the factors of FP8 blocks, always 2-D


class UnsupportedCheckpoint(ValueError):
    """A checkpoint that ``nvfp4-tc`` cannot serve as it is."""


@dataclass(frozen=True)
class TensorNames:
    """Names of tensors on disk, beside the name of their module.

    Attributes:
        weight: codes of a linear, uint8 ``(N, K/2)``.
        block_scale: float8_e4m3fn ``(N, K/16)``.
        weight_global: float32, one number.
        input_global: float32, one number; absent in weight-only checkpoints.
        k_scale: scale of an attention module's FP8 keys, float32, one number.
        v_scale: scale of its values, likewise.
    """

    weight: str
    block_scale: str
    weight_global: str
    input_global: str
    k_scale: str
    v_scale: str


class Format(ABC):
    """A format of NVFP4 checkpoints.

    Attributes:
        name: the format, and the convention that its global scales follow.
        names: names of its tensors.
        scalar: shape of the global scales.
        reciprocal: whether the global scales are divisors (2688/amax) instead of factors.
        scale_dims: dimensions of the scales of FP8 weights, by their kind.
    """

    name: ClassVar[Convention]
    names: ClassVar[TensorNames]
    scalar: ClassVar[tuple[int, ...]]
    reciprocal: ClassVar[bool]
    scale_dims: ClassVar[Mapping[Kind, int]]

    @abstractmethod
    def wrote(self, config: Mapping[str, Any]) -> bool:
        """Whether a quantization config is written in the way of this format, NVFP4 or not."""

    @abstractmethod
    def claims_nvfp4(self, config: Mapping[str, Any]) -> bool:
        """Whether a config of this format claims NVFP4."""

    @abstractmethod
    def parse(self, config: Mapping[str, Any]) -> "CheckpointConfig":
        """Read a quantization config of this format.

        Raises:
            UnsupportedCheckpoint: naming the field, what it holds, what is accepted, and what to
                do.
        """

    @abstractmethod
    def group(self, kind: Kind, *, static_input: bool) -> "LayerGroup | None":
        """Describe layers of a kind that no group of the config has; None if there is no such kind.

        Args:
            kind: kind that a layer's tensors have.
            static_input: a scale of its input is stored.
        """

    @abstractmethod
    def config(self, ignore: Sequence[str], *, weight_only: bool, fp8_kv: bool) -> dict[str, Any]:
        """Write the ``quantization_config`` of ``config.json``.

        Args:
            ignore: names of the linears that were not quantised.
            weight_only: inputs stay in 16 bits.
            fp8_kv: scales of an FP8 key/value cache are stored.
        """

    def further_files(
        self, ignore: Sequence[str], *, weight_only: bool, fp8_kv: bool
    ) -> dict[str, dict[str, Any]]:
        """Write the files that stand beside ``config.json``: contents by the files' names."""
        return {}


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are quantised in one way.

    Attributes:
        where: part of the config that describes them.
        kind: how they are quantised.
        targets: names and patterns of the modules; None: every linear that no other group names.
        settings: what vLLM's own config is given for such a layer.
        inputs: how a layer that is not NVFP4 takes its input.
        scale: name of the tensor of scales beside a weight that is not NVFP4.
    """

    where: str
    kind: Kind
    targets: tuple[str, ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Inputs = "16-bit"
    scale: str = SCALE

    @property
    def way(self) -> tuple[Kind, Inputs, str]:
        """Way in which its layers are quantised: shards of one layer must have the same."""
        return self.kind, self.inputs, self.scale

    @property
    def called(self) -> str:
        """Name of the way for messages."""
        return str(self.kind) if self.scale == SCALE else f"{self.kind} ({self.scale})"

    def scale_dims(self, format: Format) -> int:
        """Count the dimensions of its scales on disk; 0 where the format does not say."""
        if self.scale == INVERSE_SCALE:
            return 2
        return format.scale_dims.get(self.kind, 0)


@dataclass(frozen=True)
class CheckpointConfig:
    """Content of an NVFP4 checkpoint's quantization config.

    Attributes:
        format: how the checkpoint is written.
        weight_only: activations stay in 16 bits (W4A16), if not in a group.
        ignore: patterns of modules left unquantised (see ``ignore.matches``).
        targets: patterns of modules that are quantised, None for every linear.
        kv_cache_scheme: the FP8 KV-cache scheme it declares, None without one.
        groups: groups of a checkpoint of mixed precision, which then count instead of
            ``weight_only`` and ``targets``; ``()``: every layer is NVFP4.
        is_silent: a checkpoint of mixed precision, whose config does not say which layer is what.
        nvfp4_cache: it declares an NVFP4 KV cache, instead of which another one is served.
    """

    format: Format
    weight_only: bool
    ignore: tuple[str, ...] = ()
    targets: tuple[str, ...] | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    groups: tuple[LayerGroup, ...] = ()
    is_silent: bool = False
    nvfp4_cache: bool = False

    @property
    def names(self) -> TensorNames:
        """Names of a quantised linear's tensors."""
        return self.format.names

    @property
    def declared(self) -> tuple[LayerGroup, ...]:
        """Groups that the config declares, in the order in which they claim layers."""
        if self.groups or self.is_silent:
            return self.groups
        kind = Kind.NVFP4_A16 if self.weight_only else Kind.NVFP4
        return (LayerGroup("the config", kind, self.targets),)

    def check_patterns(self) -> None:
        """Check that every pattern can be read.

        Raises:
            UnsupportedCheckpoint: naming the first that cannot.
        """
        targets = [(f"{group.where}.targets", group.targets or ()) for group in self.groups]
        for name, patterns in (("ignore", self.ignore), ("targets", self.targets or ()), *targets):
            for pattern in patterns:
                try:
                    check_pattern(name, pattern)
                except InvalidPattern as error:
                    raise UnsupportedCheckpoint(f"{error}, in the checkpoint's config") from error
