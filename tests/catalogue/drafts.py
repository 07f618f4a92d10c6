"""Facts of speculative decoders that have separate checkpoints."""

from tests.catalogue.common import HEADS_128, W4A16
from tests.catalogue.family import Family

_SETTINGS = "weight-only NVFP4 in all projections of its layers, and no others"

DRAFTS: tuple[Family, ...] = (
    Family(
        "DFlash draft (of Nemotron 3.5 Lightning)",
        ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4-DFlash",),
        HEADS_128 | {"model_type": "qwen3"},
        {"*": W4A16},
        architecture="DFlashDraftModel",
        renamed={r"^model\.": "", "^lm_head.*": ""},
        by_headers="AssertionError",  # by vLLM: a draft is built beside its target
        note=_SETTINGS,
    ),
    Family(
        "DSpark draft (of Nemotron 3.5 Lightning)",
        ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4-DSpark",),
        HEADS_128 | {"model_type": "qwen3"},
        {"*": W4A16},
        architecture="Qwen3DSparkModel",
        renamed={r"^model\.": "", "^lm_head.*": ""},
        by_headers="AssertionError",  # by vLLM: a draft is built beside its target
        note=_SETTINGS,
    ),
)
