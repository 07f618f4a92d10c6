"""Model as kernels see it: linear and attention layers on one GPU."""

from dataclasses import dataclass, replace
from typing import Literal

Dtype = Literal["bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16")
PAGE_SIZE = 16  # keys of a page of the KV cache: vLLM's default


@dataclass(frozen=True)
class Layer:
    """A linear layer, or a gate and up projection fused with SiLU-and-multiply.

    Attributes:
        name: as models call it, e.g. ``"qkv_proj"``.
        n, k: rows of the weight, or of gate and of up alone, and elements of one.
        gate_up: whether it is gate and up projection, fused.
        shards: projections side by side in the weight, each with a scale of its own.
        bias: whether one is added.
        out_terms: how many NVFP4 values add up to each of the result's; 0: it is in 16 bits.
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
    """Layers of causal self-attention that differ in nothing but their window.

    Attributes:
        query_heads, kv_heads, head_dim: of one GPU.
        windows: keys that a query sees, of one layer or another; 0: all.
        soft_cap: whether logits are capped.
        rotary_dim: elements of a head that its position turns; 0: all.
        sinks: whether each head has one.
        neox: whether it turns elements R/2 apart, rather than neighbours.
        qk_norm: whether each head of queries and keys is normalised first.
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
    """Layers that kernels have to serve.

    Attributes:
        name: of the model, for tables.
        dtype: of activations and results.
        layers: distinct linear layers.
        attention: None where only linear layers are given.
        hidden: elements of a token between layers; 0 where only linear layers are given.
    """

    name: str
    dtype: Dtype
    layers: tuple[Layer, ...]
    attention: Attention | None = None
    hidden: int = 0


def quantizing_mlps(model: Model, terms: int) -> Model:
    """Model whose fused MLPs hand their results over as NVFP4, of so many terms."""
    layers = (replace(each, out_terms=terms) if each.gate_up else each for each in model.layers)
    return replace(model, layers=tuple(layers))
