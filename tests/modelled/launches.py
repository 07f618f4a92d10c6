"""Launches of a decoder layer on Blackwell, as data: the kernels in order, and who provides them.

``launches`` makes the list from a few switches; ``decoder_sm100`` gives each launch a time. Our
launches have the names of ops or, for products, of layers.
"""

from dataclasses import dataclass, replace
from typing import Literal

Maker = Literal["ours", "vLLM", "FlashInfer", "cuBLAS"]
Source = Literal["traced", "priced"]
# FlashInfer's all-reduces: with the norm, and with its quantisation too.
ALL_REDUCE_NORM = "all_reduce_add_rms_norm"
ALL_REDUCE_QUANTIZE = f"{ALL_REDUCE_NORM}_quantize"
ALL_REDUCE = "all_reduce"  # vLLM's, not fused


@dataclass(frozen=True)
class Step:
    """One launch of a layer.

    Attributes:
        name: name of the work.
        by: project that provides the kernel.
        source: source of the time: the kernel's trace, or its bytes and a stated constant.
        reads: name of the input activation.
        writes: name of the output activation.
        quantizes: whether the result is NVFP4 although it could be 16-bit.
        merges: whether attention merges the splits of the keys.
    """

    name: str
    by: Maker
    source: Source
    reads: str
    writes: str
    quantizes: bool = False
    merges: bool = False


@dataclass(frozen=True)
class Switches:
    """Switches of the fusions in a layer.

    Attributes:
        norm: whether norms quantise for the following layer (option ``fuse_norm``).
        mlp: whether the gate and up projection writes NVFP4 (``fuse_mlp``).
        attention_quantizes: whether attention, or the merge of its splits, writes NVFP4
            (``fuse_attention``).
        attention_merges: whether the last CTA of a sequence merges the splits of its keys.
        rotary_store: whether one kernel of ours rotates queries and keys, and stores keys and
            values.
        attention_stores: whether decode attention itself rotates and stores (``rotary_attention``).
        topk: whether the dispatch kernel computes top-k, instead of a preceding launch by vLLM.
    """

    norm: bool = True
    mlp: bool = True
    attention_quantizes: bool = True
    attention_merges: bool = True
    rotary_store: bool = True
    attention_stores: bool = True
    topk: bool = True


TODAY = Switches()
_VLLMS_ROTATION = replace(TODAY, rotary_store=False, attention_stores=False)
_BEFORE = replace(_VLLMS_ROTATION, attention_quantizes=False, attention_merges=False, topk=False)
VARIANTS = {
    "unfused": replace(_BEFORE, norm=False, mlp=False),
    "norm+mlp": _BEFORE,
    "norm+mlp+quantize": replace(_BEFORE, attention_quantizes=True),
    "vllm_rotation": _VLLMS_ROTATION,
    "rotary_store": replace(TODAY, attention_stores=False),
    "vllm_topk": replace(TODAY, topk=False),
    "today": TODAY,
}


@dataclass(frozen=True)
class Kind:
    """Further parameters of the list of launches.

    Attributes:
        decode: whether each sequence has one token; otherwise all sequences are prompts.
        split: whether keys are split over CTAs.
        experts: whether a mixture of experts replaces the MLP.
        qk_norm: whether queries and keys are normed by head.
        ranks: number of GPUs of the model, which all-reduce the results of o_proj and down_proj.
        fused_all_reduce: whether FlashInfer's op all-reduces, normalises and quantises, as it does
            if installed and if the batch is small enough.
        few: whether the batch is small enough for a single dispatch launch; otherwise there are two
            launches, or three starting from the router's logits.
    """

    decode: bool = True
    split: bool = False
    experts: bool = False
    qk_norm: bool = False
    ranks: int = 1
    fused_all_reduce: bool = True
    few: bool = True


def launches(switches: Switches, kind: Kind = Kind()) -> list[Step]:
    """The plugin's launches for a layer, in order."""
    steps = [
        *_norm(switches, kind),
        Step("qkv_proj", "ours", "traced", "normed", "qkv"),
        *_attention(switches, kind),
        Step("o_proj", "ours", "traced", "attended in NVFP4", "x"),
    ]
    if kind.experts:
        # Router and experts read the norm's result, so that it stays in 16 bits.
        return [*steps, _plain_norm(kind), *_experts(switches.topk, kind.few)]
    mlp = [
        Step("gate_up_proj", "ours", "traced", "normed", "hidden", quantizes=switches.mlp),
        Step("quantize", "ours", "traced", "hidden", "hidden in NVFP4"),
        Step("down_proj", "ours", "traced", "hidden in NVFP4", "x"),
    ]
    if switches.mlp:
        mlp = [mlp[0], replace(mlp[2], reads="hidden")]
    return [*steps, *_norm(switches, kind), *mlp]


def vllm_launches(kind: Kind = Kind()) -> list[Step]:
    """Default launches of vLLM 0.32 for a layer in ModelOpt's NVFP4."""

    def step(name: str, by: Maker = "vLLM") -> Step:
        return Step(name, by, "priced", "x", "x")

    norms = [step("add_rms_norm"), step("quantize")]
    if kind.ranks > 1:  # quantisation is part of the all-reduce
        norms = [step(ALL_REDUCE_QUANTIZE, "FlashInfer")]
    return [
        *norms,
        step("qkv_proj", "FlashInfer"),
        step("rotary_embedding"),
        step("store"),
        step("paged_attention", "FlashInfer"),
        *([step("merge_segments", "FlashInfer")] if kind.split else []),
        step("quantize"),
        step("o_proj", "FlashInfer"),
        *norms,
        step("gate_up_proj", "FlashInfer"),
        step("silu_mul_quantize"),
        step("down_proj", "FlashInfer"),
    ]


def _norm(switches: Switches, kind: Kind) -> list[Step]:
    """Launches of the residual sum, norm and quantisation."""
    if switches.norm and kind.ranks > 1 and kind.fused_all_reduce:
        return [Step(ALL_REDUCE_QUANTIZE, "FlashInfer", "priced", "x", "normed")]
    if switches.norm:
        read = "x" if kind.ranks == 1 else "sum"
        norm = Step("add_rms_norm_quantize", "ours", "traced", read, "normed")
        return [norm] if kind.ranks == 1 else [Step(ALL_REDUCE, "vLLM", "priced", "x", read), norm]
    return [_plain_norm(kind), Step("quantize", "ours", "traced", "normed in 16 bits", "normed")]


def _plain_norm(kind: Kind) -> Step:
    """Launch of the residual sum and norm, in 16 bits."""
    # Over several GPUs vLLM's pass fuse_allreduce_rms fuses the norms, by default.
    name, by = ("add_rms_norm", "vLLM") if kind.ranks == 1 else (ALL_REDUCE_NORM, "FlashInfer")
    return Step(name, by, "priced", "x", "normed in 16 bits")  # type: ignore[arg-type]


def _attention(switches: Switches, kind: Kind) -> list[Step]:
    """Launches from qkv_proj's result to the operand of o_proj."""
    stores = switches.attention_stores and kind.decode
    quantizes, split = switches.attention_quantizes, kind.split
    written = "attended in NVFP4" if quantizes else "attended"
    steps = [] if stores else _rotation(switches, kind)
    name, read = ("rotary_attention", "qkv") if stores else ("paged_attention", "rotated")
    attention = Step(name, "ours", "traced", read, written, quantizes)
    if split and not switches.attention_merges:
        steps.append(replace(attention, writes="parts", quantizes=False))
        steps.append(Step("merge_segments", "ours", "traced", "parts", written, quantizes))
    else:
        steps.append(replace(attention, merges=split))
    if not quantizes:
        steps.append(Step("quantize", "ours", "traced", "attended", "attended in NVFP4"))
    return steps


def _rotation(switches: Switches, kind: Kind) -> list[Step]:
    """Launches that rotate queries and keys, and store keys and values."""
    if switches.rotary_store or switches.attention_stores:
        return [Step("rotary_store", "ours", "traced", "qkv", "rotated")]
    name = "qk_norm_rotary_embedding" if kind.qk_norm else "rotary_embedding"
    return [
        Step(name, "vLLM", "priced", "qkv", "rotated"),
        Step("store", "vLLM", "priced", "rotated", "stored"),
    ]


def _experts(topk: bool, few: bool) -> list[Step]:
    """Launches of a mixture of experts, from the norm's 16-bit result."""
    name = "moe_topk_route_quantize" if topk else "moe_route_quantize"
    before = [Step(name, "ours", "traced", "normed in 16 bits", "routed")]
    if not few:
        before = [
            Step("moe_route", "ours", "traced", "ids", "routing"),
            Step("moe_quantize", "ours", "traced", "normed in 16 bits", "routed"),
        ]
    if not topk:
        before.insert(0, Step("top_k", "vLLM", "priced", "logits", "ids"))
    elif not few:
        before.insert(0, Step("moe_topk", "ours", "traced", "logits", "ids"))
    return [
        Step("router", "cuBLAS", "priced", "normed in 16 bits", "logits"),
        *before,
        Step("gate_up_proj", "ours", "traced", "routed", "hidden", quantizes=True),
        Step("down_proj", "ours", "traced", "hidden", "slots"),
        Step("moe_combine", "ours", "traced", "slots", "x"),
    ]
