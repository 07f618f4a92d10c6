"""Interface of a checkpoint format, and the content of a config in it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nvfp4_kernels.nvfp4 import Convention
from vllm_fp4_plugin.ignore import InvalidPattern, check_pattern


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
    """

    name: ClassVar[Convention]
    names: ClassVar[TensorNames]
    scalar: ClassVar[tuple[int, ...]]
    reciprocal: ClassVar[bool]

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
class CheckpointConfig:
    """Content of an NVFP4 checkpoint's quantization config.

    Attributes:
        format: how the checkpoint is written.
        weight_only: activations stay in 16 bits (W4A16).
        ignore: patterns of modules left unquantised (see ``ignore.matches``).
        targets: patterns of modules that are quantised, None for every linear.
        kv_cache_scheme: the FP8 KV-cache scheme it declares, None without one.
    """

    format: Format
    weight_only: bool
    ignore: tuple[str, ...] = ()
    targets: tuple[str, ...] | None = None
    kv_cache_scheme: dict[str, Any] | None = None

    @property
    def names(self) -> TensorNames:
        """Names of a quantised linear's tensors."""
        return self.format.names

    def check_patterns(self) -> None:
        """Check that every pattern can be read.

        Raises:
            UnsupportedCheckpoint: naming the first that cannot.
        """
        for field, patterns in (("ignore", self.ignore), ("targets", self.targets or ())):
            for pattern in patterns:
                try:
                    check_pattern(field, pattern)
                except InvalidPattern as error:
                    raise UnsupportedCheckpoint(f"{error}, in the checkpoint's config") from error
