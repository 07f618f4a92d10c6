"""Quantised ``lm_head``: the logits' product in NVFP4, on this rank's shard of the vocabulary."""

from typing import Any, NoReturn

from vllm.config import get_current_vllm_config

from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import FP8_BLOCK_SIZE, Kind
from vllm_fp4_plugin.linear.method import Nvfp4LinearMethod

# Models that look up rows of their head, for which a product in NVFP4 has no method.
_LOOKED_UP = ("ClefFlashForJointSchema", "ClefOmniForJointSchema")


def is_tied() -> bool:
    """Whether the model's config says that the head is its embedding."""
    config = get_current_vllm_config().model_config.hf_text_config
    return bool(getattr(config, "tie_word_embeddings", False))


def tied(prefix: str) -> UnsupportedCheckpoint:
    """Error of a quantised head that the model replaces by its embedding."""
    return UnsupportedCheckpoint(
        f"{prefix}: is quantised, but the model takes its embedding as the head "
        "(tie_word_embeddings), must be one or the other; set tie_word_embeddings to false in "
        "config.json if the head has weights of its own, or quantise it with lm_head excluded"
    )


def check(prefix: str, kind: Kind) -> None:
    """Check that a quantised head can be served.

    Raises:
        UnsupportedCheckpoint: it is the embedding, the model looks up rows of it, or its scales
            cannot be divided.
    """
    if is_tied():
        raise tied(prefix)
    hf_config = get_current_vllm_config().model_config.hf_config
    for architecture in getattr(hf_config, "architectures", None) or ():
        if architecture in _LOOKED_UP:
            raise UnsupportedCheckpoint(
                f"{prefix}: is {kind}, must be in 16 bits: {architecture} looks up rows of it, as "
                "of an embedding; quantise the model with lm_head excluded"
            )
    if kind is Kind.FP8_BLOCK:
        raise UnsupportedCheckpoint(
            f"{prefix}: is {kind}, whose scales of {FP8_BLOCK_SIZE} rows do not divide as a padded "
            "vocabulary does, must be NVFP4, FP8 with one scale or one a row, or in 16 bits; "
            "quantise the model with lm_head excluded"
        )


def check_ways(layer: Any, prefix: str) -> None:
    """Check that a model uses a head in no way but by multiplying with it.

    Raises:
        UnsupportedCheckpoint: it is a DSpark draft that reads rows of the weight as they are.
    """
    if getattr(layer, "_retain_weight_for_gather", False):
        raise UnsupportedCheckpoint(
            f"{prefix}: is NVFP4, must be in 16 bits where the draft's config has a "
            "dspark_draft_topk, whose tokens' rows alone vLLM multiplies; quantise the draft with "
            "markov_head excluded, or give it quantization modelopt in --speculative-config"
        )


class Nvfp4HeadMethod(Nvfp4LinearMethod):
    """Method of an ``lm_head`` whose checkpoint holds NVFP4 weights.

    Rows that pad the vocabulary are zero, and so are their logits, which vLLM cuts off.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check what else the model does with the head, then as any linear layer."""
        check_ways(layer, self.prefix)
        super().process_weights_after_loading(layer)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> NoReturn:
        """Refuse: the model's code shares the embedding though its config does not say so."""
        del layer, embed_tokens
        raise tied(self.prefix)
