"""Interface of a checkpoint format, and the parsed content of its config."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nvfp4_kernels.formats.nvfp4 import Convention
from vllm_fp4_plugin.formats.kind import Inputs, Kind
from vllm_fp4_plugin.ignore import InvalidPattern, check_pattern

SCALE = "weight_scale"
INVERSE_SCALE = "weight_scale_inv"  # DeepSeek's name for scale factors of FP8 blocks, 2-D


class UnsupportedCheckpoint(ValueError):
    """Error for a checkpoint that ``nvfp4-tc`` cannot serve as it is."""


@dataclass(frozen=True)
class TensorNames:
    """Tensor names on disk, below the name of their module.

    Attributes:
        weight: codes of a linear, uint8 ``(N, K/2)``.
        block_scale: block scales of a weight, float8_e4m3fn ``(N, K/16)``.
        weight_global: global scale of a weight, float32, one number.
        input_global: global scale of an input, float32, one number; absent in weight-only
            checkpoints.
        k_scale: scale of an attention module's FP8 keys, float32, one number.
        v_scale: scale of an attention module's FP8 values, float32, one number.
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
        name: name of the format, and of the convention of its global scales.
        names: tensor names.
        scalar: shape of the global scales.
        reciprocal: whether the global scales are divisors (2688/amax) instead of factors.
        scale_dims: number of dimensions of a weight's scales, by scheme; schemes whose number is
            not fixed are absent.
    """

    name: ClassVar[Convention]
    names: ClassVar[TensorNames]
    scalar: ClassVar[tuple[int, ...]]
    reciprocal: ClassVar[bool]
    scale_dims: ClassVar[Mapping[Kind, int]]

    @abstractmethod
    def wrote(self, config: Mapping[str, Any]) -> bool:
        """Whether a quantization config follows this format, NVFP4 or not."""

    @abstractmethod
    def claims_nvfp4(self, config: Mapping[str, Any]) -> bool:
        """Whether a config of this format claims NVFP4."""

    @abstractmethod
    def parse(self, config: Mapping[str, Any]) -> "CheckpointConfig":
        """Read a quantization config of this format.

        Raises:
            UnsupportedCheckpoint: the message names the field, its value, accepted values and the
                remedy.
        """

    @abstractmethod
    def group(self, kind: Kind, *, static_input: bool) -> "LayerGroup | None":
        """Make a group for layers that no config group covers; None if the format lacks ``kind``.

        Args:
            kind: scheme of the layer's tensors.
            static_input: whether the checkpoint stores an input scale.
        """

    @abstractmethod
    def config(self, ignore: Sequence[str], *, weight_only: bool, fp8_kv: bool) -> dict[str, Any]:
        """Make the ``quantization_config`` of ``config.json``.

        Args:
            ignore: names of the linears that were not quantised.
            weight_only: whether inputs stay in 16 bits.
            fp8_kv: whether scales of an FP8 key/value cache are stored.
        """

    def further_files(
        self, ignore: Sequence[str], *, weight_only: bool, fp8_kv: bool
    ) -> dict[str, dict[str, Any]]:
        """Contents, by file name, of further files to write next to ``config.json``.

        The arguments are those of ``config``.
        """
        return {}


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share one quantization scheme.

    Attributes:
        where: source of the group, for messages: part of the config, or the tensors' headers.
        kind: quantization scheme.
        targets: names and patterns of the modules; None: every linear that no other group names.
        settings: fields of the group from which vLLM's own quantization config is made.
        inputs: input scaling of a non-NVFP4 layer.
        scale: name of the scale tensor of a non-NVFP4 weight.
    """

    where: str
    kind: Kind
    targets: tuple[str, ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Inputs = "16-bit"
    scale: str = SCALE

    @property
    def way(self) -> tuple[Kind, Inputs, str]:
        """Key of the scheme: all shards of one layer must have the same key."""
        return self.kind, self.inputs, self.scale

    @property
    def called(self) -> str:
        """Name of the scheme for messages."""
        return str(self.kind) if self.scale == SCALE else f"{self.kind} ({self.scale})"

    def scale_dims(self, format: Format) -> int:
        """Number of dimensions of the scales on disk; 0 if the format does not fix the number."""
        if self.scale == INVERSE_SCALE:
            return 2
        return format.scale_dims.get(self.kind, 0)


@dataclass(frozen=True)
class CheckpointConfig:
    """Content of an NVFP4 checkpoint's quantization config.

    Attributes:
        format: format of the checkpoint.
        weight_only: whether activations stay in 16 bits (W4A16); True for a mixed-precision
            checkpoint, where ``groups`` or the tensors decide.
        ignore: patterns of modules left unquantised (see ``ignore.matches``).
        targets: patterns of quantised modules; None: every linear.
        kv_cache_scheme: the declared FP8 KV-cache scheme, or None.
        groups: groups of a mixed-precision checkpoint, which replace ``weight_only`` and
            ``targets``; ``()``: every quantised layer is NVFP4, unless ``is_silent``.
        is_silent: whether the checkpoint is mixed-precision, but its config lists no schemes.
        nvfp4_cache: whether an NVFP4 KV cache is declared; the plugin serves another dtype instead.
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
        """Tensor names of a quantised linear."""
        return self.format.names

    @property
    def declared(self) -> tuple[LayerGroup, ...]:
        """Groups that the config declares, in order; one group if not mixed-precision."""
        if self.groups or self.is_silent:
            return self.groups
        kind = Kind.NVFP4_A16 if self.weight_only else Kind.NVFP4
        return (LayerGroup("the config", kind, self.targets),)

    def check_patterns(self) -> None:
        """Check that every pattern can be parsed.

        Raises:
            UnsupportedCheckpoint: the message names the first invalid pattern.
        """
        targets = [(f"{group.where}.targets", group.targets or ()) for group in self.groups]
        for name, patterns in (("ignore", self.ignore), ("targets", self.targets or ()), *targets):
            for pattern in patterns:
                try:
                    check_pattern(name, pattern)
                except InvalidPattern as error:
                    raise UnsupportedCheckpoint(f"{error}, in the checkpoint's config") from error
