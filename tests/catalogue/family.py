"""Description of a family of checkpoints."""

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
        name: name in the table.
        checkpoints: names of the checkpoints that are served.
        config: transformers' config, ``model_type`` included, with smaller sizes, except that head
            sizes are the real ones.
        kinds: kind of each linear layer by the first pattern that matches its module's name on
            disk; ``UNQUANTIZED`` patterns are the config's exclude list.
        format: exporter's format.
        fp8_kv: whether the export says that the KV cache is FP8.
        architecture: class that ``config.json`` names; empty: the class of transformers. See
            ``hub``.
        multimodal: whether transformers' image-and-text class saves the checkpoint.
        stacked: whether one tensor holds the weights of all experts, rather than one tensor each.
        fields: fields of the hub's ``config.json`` that transformers' config lacks, or has with
            another value; a dot leads into an object.
        by_headers: part of the error message if the model cannot be built here, because it needs a
            GPU or because transformers' config differs from the hub's; the plan is then made from
            the checkpoint's headers.
        only_gpu: whether vLLM's code for CPUs cannot build the model.
        on_cpu: vLLM's error for the text model on a CPU; empty if it is the error of
            ``by_headers``.
        ran: test that serves the family and compares its output; empty: the family is only planned.
        renamed: regular expressions in names that transformers writes, with the exporters'
            replacements; no replacement: exporters write no such tensor.
        note: assumption made where the checkpoints are not published; empty: none.
        surround: function that turns a text model's checkpoint into the whole model's, for which
            transformers has no class; the config then comes with code, as on the hub.
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
        """Patterns of the layers in 16 bits, for the config."""
        return [p for p, kind in self.kinds.items() if kind is Kind.UNQUANTIZED]
