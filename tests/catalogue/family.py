"""What is known of a family of checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from vllm_fp4_plugin.formats.kind import Kind

Format = Literal["modelopt", "compressed-tensors"]


@dataclass(frozen=True)
class Family:
    """Family of checkpoints of one architecture, format and precision.

    Attributes:
        name: what the table calls it.
        checkpoints: names of those that are served.
        config: transformers' config, ``model_type`` included, with sizes divided; head sizes are
            the real ones.
        kinds: kind of each linear layer by the first pattern that matches its module's name on
            disk; ``UNQUANTIZED`` patterns are the config's exclude list.
        format: exporter's format.
        fp8_kv: whether the export says that the KV cache is FP8.
        architecture: class that ``config.json`` names; empty: transformers' own. See ``hub``.
        multimodal: whether it is transformers' image-and-text class that saves it.
        stacked: whether one tensor holds the weights of all experts, in place of one for each.
        fields: fields of ``config.json`` that the hub's has and transformers' has not, or has
            otherwise; a dot leads into an object.
        by_headers: part of what is said when the model is to be built: it is not for a CPU, or
            transformers' config of it is not the hub's; it is planned by its headers then.
        only_gpu: whether it is vLLM's code for CPUs that cannot build it.
        on_cpu: what vLLM says of its text model there, where that of the whole fails before;
            empty: what is said of the whole.
        ran: test that serves it and compares what comes out; empty: it is only planned.
        renamed: regular expressions in names that transformers writes, and what exporters have;
            nothing: they have no such tensor.
        note: part of this that stands in for what is not known of the checkpoints; empty: none.
        surround: makes the checkpoint of a text model that of the whole, which transformers has
            no class of; its config comes with code then, as the hub's does.
    """

    name: str
    checkpoints: tuple[str, ...]
    config: Mapping[str, Any]
    kinds: Mapping[str, Kind]
    format: Format = "modelopt"
    fp8_kv: bool = False
    architecture: str = ""
    multimodal: bool = False
    stacked: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    by_headers: str = ""
    only_gpu: bool = False
    on_cpu: str = ""
    ran: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    surround: Callable[[Path], None] | None = None

    def kind(self, module: str) -> Kind:
        """Kind of a linear layer by its module's name on disk.

        Raises:
            LookupError: no pattern matches.
        """
        for pattern, kind in self.kinds.items():
            if fnmatchcase(module, pattern):
                return kind
        raise LookupError(f"{self.name}: no pattern of kinds covers {module}")

    @property
    def excluded(self) -> list[str]:
        """Patterns of layers in 16 bits, for the config."""
        return [p for p, kind in self.kinds.items() if kind is Kind.UNQUANTIZED]
