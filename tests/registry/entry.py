"""Description of one architecture's miniature, beyond what shrinking a config class gives."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """Miniature of one architecture.

    Attributes:
        model_type: key of transformers' ``CONFIG_MAPPING`` or of vLLM's own classes, whose defaults
            are shrunk; empty: the class that transformers maps to the architecture. A model whose
            config class comes with remote code has ``"bag"``: fields alone.
        changes: fields beside the shrunk ones, sub-configs as dictionaries or entries; ``...``
            leaves one out.
        class_name: name of a bag's class, where vLLM asks for it.
        ignore: patterns of layers that the plugin leaves in 16 bits, whose widths it cannot take.
    """

    model_type: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    class_name: str = "PreTrainedConfig"


@dataclass(frozen=True)
class Draft:
    """Speculative decoder, which vLLM builds beside a target.

    Attributes:
        target: architecture of the target.
        method: vLLM's name for the way of drafting.
        own: the draft's own config; nothing: the target's checkpoint holds the draft's layers.
        changes: fields of the target's config beside the target's own miniature.
    """

    target: str
    method: str = "mtp"
    own: Entry | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
