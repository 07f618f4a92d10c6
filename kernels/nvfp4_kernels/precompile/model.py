"""Parameters of a model on which kernels depend: linear and attention layers on one GPU."""

from dataclasses import dataclass, replace
from typing import Literal

Dtype = Literal["bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16")
PAGE_SIZE = 16  # keys of a page of the KV cache: vLLM's default


@dataclass(frozen=True)
class Layer:
    """Linear layer, or gate and up projections fused with SiLU-and-multiply.

    Attributes:
        name: name in models, e.g. ``"qkv_proj"``.
        n, k: rows of the weight (of gate alone if fused), and elements per row.
        gate_up: whether the layer is a fused gate and up projection.
        shards: number of projections stacked in the weight, each with its own global scale.
        bias: whether a bias is added.
        out_terms: number of NVFP4 terms of the output, 1 also of an E4M3 output; 0: 16-bit output.
    """

    name: str
    n: int
    k: int
    gate_up: bool = False
    shards: int = 1
    bias: bool = False
    out_terms: int = 0

    @property
    def weights(self) -> int:
        return 2 if self.gate_up else 1


@dataclass(frozen=True)
class Attention:
    """Layers of causal self-attention that differ only in their window.

    Attributes:
        query_heads, kv_heads, head_dim: heads on one GPU, and elements per head.
        windows: distinct windows of the layers, in keys; 0: all keys.
        soft_cap: whether logits are capped.
        rotary_dim: rotated elements of a head; 0: all.
        sinks: whether heads have attention sinks.
        neox: whether the elements of a rotated pair are half the rotated elements apart; else
            neighbours.
        qk_norm: whether each head of queries and keys is normalised before rotation.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...] = (0,)
    soft_cap: bool = False
    rotary_dim: int = 0
    sinks: bool = False
    neox: bool = True
    qk_norm: bool = False


@dataclass(frozen=True)
class Model:
    """Layers that kernels must serve.

    Attributes:
        name: name of the model, for tables.
        dtype: dtype of activations and results.
        layers: distinct linear layers.
        attention: attention layers, or None.
        hidden: hidden size; 0 if there are only linear layers.
    """

    name: str
    dtype: Dtype
    layers: tuple[Layer, ...]
    attention: Attention | None = None
    hidden: int = 0


def quantizing_mlps(model: Model, terms: int) -> Model:
    """Copy of ``model`` whose fused gate-up layers write NVFP4 of ``terms`` terms."""
    layers = (replace(each, out_terms=terms) if each.gate_up else each for each in model.layers)
    return replace(model, layers=tuple(layers))
