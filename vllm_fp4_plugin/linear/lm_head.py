"""Quantised ``lm_head``: an NVFP4 GEMM for the logits, on this rank's shard of the vocabulary."""

from typing import Any, NoReturn

from vllm.config import get_current_vllm_config

from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import FP8_BLOCK_SIZE, Kind
from vllm_fp4_plugin.linear.stored import Nvfp4LinearMethod

# Models that look up rows of their head, which an NVFP4 GEMM does not support.
_LOOKED_UP = ("ClefFlashForJointSchema", "ClefOmniForJointSchema")


def is_tied() -> bool:
    """Whether the model's config ties the head to the embedding."""
    config = get_current_vllm_config().model_config.hf_text_config
    return bool(getattr(config, "tie_word_embeddings", False))


def tied(prefix: str) -> UnsupportedCheckpoint:
    """Error for a quantised head in a model with tied embeddings."""
    return UnsupportedCheckpoint(
        f"{prefix}: is quantised, but the model takes its embedding as the head "
        "(tie_word_embeddings), must be one or the other; set tie_word_embeddings to false in "
        "config.json if the head has weights of its own, or quantise it with lm_head excluded"
    )


def check(prefix: str, kind: Kind) -> None:
    """Check that a quantised head can be served.

    ``kind``: quantization scheme of the head.

    Raises:
        UnsupportedCheckpoint: the head is tied to the embedding, the model looks up rows of the
            head, or its scales cannot be sharded.
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
    """Check that a model uses a head only in matrix products.

    Raises:
        UnsupportedCheckpoint: the model is a DSpark draft that reads rows of the weight directly.
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
        """Check that the model reads no rows of the head; convert as for any other linear layer."""
        check_ways(layer, self.prefix)
        super().process_weights_after_loading(layer)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> NoReturn:
        """Refuse a model whose code ties head and embedding although the config does not."""
        del layer, embed_tokens
        raise tied(self.prefix)
