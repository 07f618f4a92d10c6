"""Checkpoint names of a draft model's layers.

Most vLLM models number a draft's layers on from the target's last layer.
"""

import re
from collections.abc import Callable
from typing import Any

# vLLM passes its mapping of fused layers to the config of the target alone.
PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
# Substrings of vLLM's class names for drafts with checkpoints of their own. MTP heads of a target
# are ``…MTP…``; their layers keep the names on disk.
_APART = ("eagle", "dflash", "dspark", "lilicorr", "medusa", "museglimmerassistant", "xpress")
_LAYER = re.compile(r"model\.layers\.(?P<index>\d+)\.(?P<rest>.+)")


def is_draft(hf_config: Any) -> bool:
    """Whether a model's config describes a draft with a checkpoint of its own."""
    names = getattr(hf_config, "architectures", None) or ()
    return any(part in name.lower() for name in names for part in _APART)


def on_disk(prefix: str, target_layers: int, is_there: Callable[[str], bool]) -> str:
    """Name of a layer in the draft's checkpoint.

    Args:
        prefix: vLLM's name, e.g. ``model.layers.32.self_attn.qkv_proj``.
        target_layers: number of the target's layers, e.g. 32.
        is_there: function of a name; True if the checkpoint has this module, or a sibling of it.

    Returns:
        Name in the checkpoint, e.g. ``midlayer.self_attn.qkv_proj``; ``prefix`` if no module is
        found.
    """
    match = _LAYER.fullmatch(prefix)
    if match is None:
        bare = prefix.removeprefix("model.")
        names = [prefix, bare, f"encoder.{bare}"]  # for example the fc of MuseGlimmer's assistant
    else:
        counted, rest = int(match["index"]), match["rest"]
        # Some models number a draft's layers from 0, and a draft has fewer layers than its target.
        index = counted - target_layers if counted >= target_layers else counted
        names = [f"layers.{index}.{rest}", f"model.layers.{index}.{rest}"]
        names += [f"midlayer.{rest}"] if index == 0 else []
    return next(filter(is_there, names), prefix)
