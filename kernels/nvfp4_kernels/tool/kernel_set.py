"""Which kernels a model needs: every one that any number of tokens is given. No CuTe in here."""

from dataclasses import dataclass
from importlib import import_module
from itertools import product
from typing import Any, Literal

from nvfp4_kernels.attention.config import HEAD_DIMS
from nvfp4_kernels.compile import DeviceKernel
from nvfp4_kernels.dispatch import Mode
from nvfp4_kernels.merge_segments.config import MOST_AHEAD
from nvfp4_kernels.quantize.config import choose_config as choose_quantize
from nvfp4_kernels.sm100.attention.choose import AttentionProblem
from nvfp4_kernels.sm100.attention.choose import choose_config as choose_attention
from nvfp4_kernels.sm100.attention.tile import KEYS, AttentionTile, Variant
from nvfp4_kernels.sm100.choose import SMS, Problem, choose_config
from nvfp4_kernels.sm100.tile import Output, Tile
from nvfp4_kernels.tool.model import Attention, Dtype, Layer, Model

# How activations are scaled: by one calibrated number, or one for each token.
Activation = Literal["static", "per-token"]
ACTIVATIONS: tuple[Activation, ...] = ("static", "per-token")
# What the KV cache holds: the model's own dtype, or E4M3.
Cache = Literal["auto", "fp8"]
CACHES: tuple[Cache, ...] = ("auto", "fp8")
PAGE_SIZE = 16  # keys: vLLM's default
_ELEMENT_SIZE = 2  # of bfloat16 and float16


@dataclass(frozen=True)
class KernelSpec:
    """A kernel in one configuration, named rather than made: making it takes CuTe.

    Attributes:
        op: what it belongs to, for tables.
        target: ``"module:class"``.
        fields: of that dataclass.
    """

    op: str
    target: str
    fields: tuple[Any, ...]

    def kernel(self) -> DeviceKernel:
        module, _, kind = self.target.partition(":")
        return getattr(import_module(module), kind)(*self.fields)


def model_kernels(
    model: Model,
    *,
    max_tokens: int,
    activations: tuple[Activation, ...] = ACTIVATIONS,
    sms: int = SMS,
) -> dict[KernelSpec, list[str]]:
    """Every kernel of ``model``'s linear layers and of their inputs, with the layers it serves.

    Args:
        model: dense decoder.
        max_tokens: of a batch, at the most; all numbers from 1 on are covered.
        activations: how they may be scaled.
        sms: of the GPU.
    """
    found: dict[KernelSpec, list[str]] = {}
    for activation in activations:
        per_token = activation == "per-token"
        for layer in model.layers:
            specs = quantize_kernels(model.dtype, layer.k, max_tokens, per_token)
            specs += _product_kernels(model.dtype, layer, max_tokens, per_token, sms)
            for spec in specs:
                users = found.setdefault(spec, [])
                if layer.name not in users:
                    users.append(layer.name)
    return found


def attention_kernels(
    attention: Attention,
    dtype: Dtype,
    *,
    caches: tuple[Cache, ...] = CACHES,
    page_size: int = PAGE_SIZE,
    sms: int = SMS,
) -> dict[KernelSpec, list[str]]:
    """Those of every batch, prefill or decode: each tile that may be chosen, split or not."""
    found: list[KernelSpec] = []
    for window, cache in product(attention.windows, caches):
        arch_mode: tuple[str, Mode] = ("sm_100", "fp8_kv" if cache == "fp8" else "float")
        if attention.head_dim not in HEAD_DIMS[arch_mode]:
            continue  # served by another backend of vLLM's, as it says at start
        for tile, split in _attention_tiles(attention, cache == "fp8", window, sms):
            variant = Variant(
                dtype,
                "paged",
                page_size,
                causal=True,
                window=window > 0,
                soft_cap=attention.soft_cap,
                split=split,
            )
            found.append(attention_spec(tile, variant))
    if found:
        found += [
            merge_spec(dtype, attention.head_dim, 2**i) for i in range(MOST_AHEAD.bit_length())
        ]
    return {spec: ["attention"] for spec in dict.fromkeys(found)}


def attention_spec(tile: AttentionTile, variant: Variant) -> KernelSpec:
    """An attention kernel."""
    op = "paged_attention" if variant.layout == "paged" else "attention"
    return KernelSpec(op, "nvfp4_kernels.sm100.attention.fmha:FmhaSm100", (tile, variant))


def merge_spec(dtype: Dtype, head_dim: int, ahead: int) -> KernelSpec:
    """The kernel that merges split keys."""
    fields = "float32", dtype, head_dim, False, ahead
    target = "nvfp4_kernels.merge_segments.sm100:MergeSegmentsSm100"
    return KernelSpec("merge_segments", target, fields)


def _attention_tiles(
    attention: Attention, fp8: bool, window: int, sms: int
) -> list[tuple[AttentionTile, bool]]:
    """Tiles and whether they split keys, over batches from one token to a long prompt."""
    group = attention.query_heads // attention.kv_heads
    chosen = []
    for queries, keys in product((1, 2 * KEYS), (KEYS, 1 << 20)):
        problem = AttentionProblem(
            1, queries, keys, attention.kv_heads, group, attention.head_dim, fp8, window
        )
        tile, splits = choose_attention(problem, sms)
        chosen.append((tile, splits > 1))
    return list(dict.fromkeys(chosen))


def quantize_kernels(dtype: Dtype, k: int, max_tokens: int, per_token: bool) -> list[KernelSpec]:
    """Those that quantise rows of ``k`` elements; all that plain layers take their input from."""
    tokens = range(1, max_tokens + 1)
    tiles = [choose_quantize(m, k, _ELEMENT_SIZE, per_token) for m in tokens]
    target = "nvfp4_kernels.quantize.sm100:QuantizeSm100"
    return [
        KernelSpec("quantize", target, (dtype, per_token, tile)) for tile in dict.fromkeys(tiles)
    ]


def _product_kernels(
    dtype: Dtype, layer: Layer, max_tokens: int, per_token: bool, sms: int
) -> list[KernelSpec]:
    output = layer_output(layer, dtype, per_token)
    op = "silu_mul_gemm" if layer.pair else "gemm"
    tokens = range(1, max_tokens + 1)
    problems = (Problem(m, layer.n, layer.k, 1, layer.weights) for m in tokens)
    chosen = [choose_config(problem, output, sms) for problem in problems]
    return [product_spec(op, *tile_and_output) for tile_and_output in dict.fromkeys(chosen)]


def layer_output(layer: Layer, dtype: Dtype, per_token: bool) -> Output:
    """What becomes of a layer's accumulators."""
    bias = dtype if layer.bias else ""
    return Output(dtype, shards=layer.shards, bias=bias, row_scale=per_token)


def product_spec(op: str, tile: Tile, output: Output) -> KernelSpec:
    """A block-scaled GEMM."""
    return KernelSpec(op, "nvfp4_kernels.sm100.block_scaled:BlockScaledGemm", (tile, output))
