"""Fusion of norms with the all-reduce of row-parallel layers over tensor-parallel ranks.

A row-parallel layer of ours returns its rank's partial sum, an ``Unreduced``; the norm that
consumes the partial sum all-reduces, adds the residual, normalises and quantises in one op.
"""

from typing import Any, NamedTuple

from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size

from nvfp4_kernels.dispatch import Kernel
from vllm_fp4_plugin import batch_invariance
from vllm_fp4_plugin.fusion.match_all_reduce import READS_BETWEEN, producer_before
from vllm_fp4_plugin.fusion.match_norm import NormMatch
from vllm_fp4_plugin.fusion.norm_quantize import Reduction
from vllm_fp4_plugin.ops import flashinfer_all_reduce


class Before(NamedTuple):
    """Row-parallel layer before a norm, and the all-reduce that the norm does for the layer.

    Attributes:
        producer: row-parallel layer of ours whose partial sums the norm all-reduces; None: the
            norm's input is already reduced.
        reduction: how the norm all-reduces; None without a producer.
        note: note on the all-reduce, for the report; without a producer, the reason; empty on one
            rank.
    """

    producer: Any
    reduction: Reduction | None
    note: str


NONE = Before(None, None, "")


def before(match: NormMatch, layer: Any, kernel: Kernel) -> Before:
    """Find the row-parallel layer whose all-reduce a quantising norm can take over.

    Args:
        match: the norm, which can quantise for ``layer``.
        layer: linear layer that consumes the norm's quantised result.
        kernel: kernel of the norm with a residual.
    """
    if get_tensor_model_parallel_world_size() == 1:
        return NONE
    if batch_invariance.is_wanted():
        return Before(None, None, "all-reduce before it: vLLM's, whose order is fixed")
    config, plan = get_current_vllm_config(), layer.quant_method.plan
    owner = match.owners[0]
    [name] = [name for name, module in owner._modules.items() if module is match.norm]
    speculative = config.speculative_config
    reads_between = speculative is not None and speculative.method in READS_BETWEEN
    producer, why_not = producer_before(match.owners, name, reads_between)
    why_not = why_not or _unsupported_reason(plan, producer)
    if why_not:
        return Before(None, None, f"all-reduce before it: {why_not}")
    tokens, why = flashinfer_all_reduce.most_tokens(
        config, kernel.arch, plan.terms, match.norm, layer.params_dtype
    )
    width = flashinfer_all_reduce.widest(config) if tokens else 0
    return Before(producer, Reduction(tokens, width, producer), _note(producer, tokens, why))


def vllm_does_better(config: Any, match: Before) -> str:
    """Reason to keep vLLM's norm, if only vLLM can fuse an all-reduce into the norm; else empty.

    Args:
        config: config of the engine.
        match: layer before the norm, as found by ``before``.
    """
    if match.producer is not None or not config.compilation_config.pass_config.fuse_allreduce_rms:
        return ""
    why = match.note.partition(": ")[2]
    return ": ".join(filter(None, ("vLLM fuses it with an all-reduce", why)))


def _unsupported_reason(plan: Any, producer: Any) -> str:
    """Reason why a norm cannot all-reduce a layer's partial sums; empty if it can.

    Args:
        plan: plan of the linear layer that consumes the norm's result.
        producer: row-parallel layer before the norm.
    """
    name = producer.prefix.rpartition(".")[2]
    method = producer.quant_method
    reasons = {
        f"{name} is {type(method).__name__}'s": not hasattr(method, "hand_on_part"),
        f"{name}'s result is not to be added up": (
            not producer.reduce_results or producer.tp_size == 1
        ),
        "a scale per token": plan.activation != "static",
        "its kernel writes NVFP4 alone": plan.is_fp8,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _note(producer: Any, tokens: int, why: str) -> str:
    name = producer.prefix.rpartition(".")[2]
    if tokens:
        how = (
            f"in flashinfer's op (untried on a GPU) up to {tokens} tokens, "
            "by an all-reduce before it above"
        )
    else:
        how = f"by an all-reduce before it (flashinfer's op: {why})"
    return f"adds up {name}'s result, {how}"
