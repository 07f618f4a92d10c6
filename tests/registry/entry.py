"""Description of one architecture's scaled-down model, beyond the shrunk config class."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """Scaled-down model of one architecture.

    Attributes:
        model_type: key, in transformers' ``CONFIG_MAPPING`` or among vLLM's own classes, of the
            config class whose defaults are shrunk; empty: the class that transformers maps to the
            architecture; ``"bag"``: plain fields, for a model whose config class is remote code.
        changes: fields that replace or extend the shrunk fields; sub-configs are dictionaries or
            entries; ``...`` removes a field.
        class_name: name of a bag's class, where vLLM checks the name.
        ignore: patterns of layers that stay in 16 bits because the plugin does not support their
            widths.
    """

    model_type: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    class_name: str = "PreTrainedConfig"


@dataclass(frozen=True)
class Draft:
    """Speculative decoder that vLLM builds with a target model.

    Attributes:
        target: architecture of the target.
        method: vLLM's name of the speculative method.
        own: the draft's own config; None: the target's checkpoint holds the draft's layers.
        changes: fields of the target's config that differ from the target's own miniature.
    """

    target: str
    method: str = "mtp"
    own: Entry | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
