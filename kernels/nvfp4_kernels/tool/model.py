"""Linear and attention layers of a model on one GPU, from Hugging Face's ``config.json``."""

from pathlib import Path
from typing import Literal

from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from nvfp4_kernels.precompile.model import Attention, Dtype, Layer, Model
from nvfp4_kernels.tool.config_file import ModelConfig, UnusableModel, load_config

# They have a bias on q, k and v, and no field that says so.
_BIASED_QKV = ("qwen2", "qwen2_moe")
# Facts of attention in no config field: each head has a norm; pairs are neighbouring elements.
_QK_NORMS = ("qwen3", "qwen3_moe")
_NEIGHBOURS = ("cohere", "cohere2", "glm", "glm4")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def number_of_experts(config: ModelConfig) -> int:
    """Number of routed experts per MoE layer; 0 for a dense model."""
    given = next((key for key in _EXPERTS if config.fields.get(key)), None)
    return 0 if given is None else config.number(given)


def read_model(
    path: Path, *, tensor_parallel: int = 1, dtype: Dtype | None = None, fuse_mlp: bool = True
) -> Model:
    """Read the layers of a dense decoder with gated MLPs: Llama, Mistral, Qwen 2 and 3, etc.

    Args:
        path: ``config.json`` or its directory.
        tensor_parallel: GPUs that share each layer.
        dtype: overrides the model's dtype.
        fuse_mlp: whether the gate and up projections and SiLU-and-multiply are one kernel.

    Raises:
        UnusableModel: the file is missing, the model is unsupported, or a size, which the message
            names, is not divisible by ``tensor_parallel``.
    """
    config = load_config(path)
    experts = number_of_experts(config)
    if experts:
        raise UnusableModel(
            f"{config.name}: has {experts} experts in a layer, must be a dense decoder; name the "
            "sizes of its dense layers, as with --linear, --gate-up or --shape"
        )
    return dense_model(config, tensor_parallel=tensor_parallel, dtype=dtype, fuse_mlp=fuse_mlp)


def dense_model(
    config: ModelConfig, *, tensor_parallel: int, dtype: Dtype | None, fuse_mlp: bool
) -> Model:
    """Layers of a dense decoder, see ``read_model``."""
    hidden = config.number("hidden_size")
    attention, projections = attention_layers(config, tensor_parallel)
    inner = config.share(config.number("intermediate_size"), tensor_parallel, "intermediate_size")
    layers = (*projections, *mlp_layers("", inner, hidden, config, fuse=fuse_mlp))
    for layer in layers:
        check_sizes(layer)
    return Model(config.name, dtype or config.dtype, layers, attention, hidden)


def attention_layers(
    config: ModelConfig, tensor_parallel: int
) -> tuple[Attention, tuple[Layer, Layer]]:
    """Attention (MHA or GQA) on one GPU, and its qkv and output projections."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    kv_heads = config.number("num_key_value_heads", default=heads)
    if heads % kv_heads:
        accepted = f"a divisor of num_attention_heads = {heads}"
        raise config.malformed("num_key_value_heads", kv_heads, accepted)
    head_dim = config.number("head_dim", default=hidden // heads)
    heads = config.share(heads, tensor_parallel, "num_attention_heads")
    if kv_heads > tensor_parallel:
        kv_heads = config.share(kv_heads, tensor_parallel, "num_key_value_heads")
    else:
        kv_heads = 1  # each GPU holds at least one
    q, kv = heads * head_dim, kv_heads * head_dim
    biased = bool(config.fields.get("attention_bias"))
    qkv_biased = biased or config.model_type in _BIASED_QKV
    attention = Attention(
        heads,
        kv_heads,
        head_dim,
        _windows(config),
        soft_cap=bool(config.fields.get("attn_logit_softcapping")),
        rotary_dim=_rotary_dim(config, head_dim),
        neox=config.model_type not in _NEIGHBOURS,
        qk_norm=config.model_type in _QK_NORMS,
    )
    qkv = Layer("qkv_proj", q + 2 * kv, hidden, shards=3, bias=qkv_biased)
    return attention, (qkv, Layer("o_proj", hidden, q, bias=biased))


def mlp_layers(
    where: Literal["", "shared experts'"],
    inner: int,
    hidden: int,
    config: ModelConfig,
    *,
    fuse: bool,
) -> tuple[Layer, Layer]:
    """Gate-up and down projections of an MLP with ``inner`` intermediate elements on this GPU."""
    bias = bool(config.fields.get("mlp_bias"))
    gate_up, down = (
        " ".join(filter(None, (where, name))) for name in ("gate_up_proj", "down_proj")
    )
    if fuse and not bias:
        first = Layer(gate_up, inner, hidden, gate_up=True)
    else:
        first = Layer(gate_up, 2 * inner, hidden, shards=2, bias=bias)
    return first, Layer(down, hidden, inner, bias=bias)


def _rotary_dim(config: ModelConfig, head_dim: int) -> int:
    """Number of rotated elements of a head; 0: all."""
    fields = config.fields
    key = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope = fields.get(key) or {}
    if not isinstance(rope, dict):
        raise config.malformed(key, rope, "an object")
    key = "partial_rotary_factor"
    factor = rope.get(key) or fields.get(key) or 1.0
    if not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise config.malformed(key, factor, "a number above 0, at most 1")
    return 0 if factor == 1.0 else int(head_dim * factor)


def _windows(config: ModelConfig) -> tuple[int, ...]:
    """Distinct windows of the layers; 0: full attention, included if no layer types are given."""
    fields = config.fields
    if not fields.get("sliding_window") or fields.get("use_sliding_window") is False:
        return (0,)
    window = config.number("sliding_window")
    kinds = fields.get("layer_types") or ["full_attention"]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise config.malformed("layer_types", kinds, "a list of strings")
    return (0, window) if "full_attention" in kinds else (window,)


def explicit(linear: list[str], gate_up: list[str], dtype: Dtype | None = None) -> Model:
    """Layers of given sizes, each written ``"N,K"``.

    Raises:
        UnusableModel: a text is not of this form, or a size is unsupported.
    """
    layers = [Layer(f"linear {s}", *_rows_and_k(s, "--linear")) for s in linear]
    layers += [Layer(f"gate_up {s}", *_rows_and_k(s, "--gate-up"), gate_up=True) for s in gate_up]
    for layer in layers:
        check_sizes(layer)
    return Model("given sizes", dtype or "bfloat16", tuple(layers))


def check_sizes(layer: Layer) -> None:
    """Raise if a layer cannot be quantised.

    Raises:
        UnusableModel: N or K is not a positive multiple of 16.
    """
    for size, value in (("N", layer.n), ("K", layer.k)):
        if value < 1 or value % BLOCK_SIZE:
            raise UnusableModel(
                f"{layer.name}: {size} is {value}, must be a positive multiple of {BLOCK_SIZE}; "
                "quantise other layers, or use fewer GPUs for each"
            )


def numbers(text: str, option: str, form: str) -> list[int]:
    """Parse numbers such as ``"1,2,3"``.

    Args:
        text: text to parse.
        option: name of the option, for the error.
        form: expected form, e.g. ``"M,N,K[,L]"``; the part in brackets is optional.

    Raises:
        UnusableModel: the text is not of this form, or a number is not positive.
    """
    parts = text.split(",")
    least, most = form.partition("[")[0].count(",") + 1, form.count(",") + 1
    positive = all(p.strip().isdecimal() and int(p) > 0 for p in parts)
    if not (least <= len(parts) <= most and positive):
        raise UnusableModel(f"{option}: is {text!r}, must be {form}, all positive numbers")
    return [int(p) for p in parts]


def _rows_and_k(text: str, option: str) -> tuple[int, int]:
    n, k = numbers(text, option, "N,K")
    return n, k
