"""A model's linear and attention layers, from Hugging Face's ``config.json``, on one GPU."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nvfp4_kernels.nvfp4 import BLOCK_SIZE

Dtype = Literal["bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16")
# They have a bias on q, k and v, and no field that says so.
_BIASED_QKV = ("qwen2",)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class UnusableModel(ValueError):
    """A model's configuration that gives no layers to build kernels for."""


@dataclass(frozen=True)
class Layer:
    """A linear layer, or a gate and up projection fused with SiLU-and-multiply.

    Attributes:
        name: as models call it, e.g. ``"qkv_proj"``.
        n, k: rows of the weight, of each of a pair, and elements of one.
        pair: whether it is gate and up projection.
        shards: projections side by side in the weight, each with a scale of its own.
        bias: whether one is added.
    """

    name: str
    n: int
    k: int
    pair: bool = False
    shards: int = 1
    bias: bool = False

    def __post_init__(self) -> None:
        for size, value in (("N", self.n), ("K", self.k)):
            if value < 1 or value % BLOCK_SIZE:
                raise UnusableModel(
                    f"{self.name}: {size} is {value}, must be a positive multiple of {BLOCK_SIZE}; "
                    "quantise other layers, or use fewer GPUs for each"
                )

    @property
    def weights(self) -> int:
        return 2 if self.pair else 1


@dataclass(frozen=True)
class Attention:
    """Layers of causal self-attention that differ in nothing but their window.

    Attributes:
        query_heads, kv_heads, head_dim: of one GPU.
        windows: keys that a query sees, of one layer or another; 0: all.
        soft_cap: whether logits are capped.
        rotary_dim: elements of a head that its position turns; 0: all.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...] = (0,)
    soft_cap: bool = False
    rotary_dim: int = 0


@dataclass(frozen=True)
class Model:
    """What kernels have to serve.

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


def read_model(
    path: Path, *, tensor_parallel: int = 1, dtype: Dtype | None = None, fuse_mlp: bool = True
) -> Model:
    """The layers of a dense decoder with gated MLPs: Llama, Mistral, Qwen 2 and 3 and the like.

    Args:
        path: ``config.json``, or the directory it is in.
        tensor_parallel: GPUs that share each layer.
        dtype: instead of the model's own.
        fuse_mlp: whether gate and up projection are one kernel with SiLU-and-multiply.

    Raises:
        UnusableModel: no such file, no such model, or sizes that cannot be shared out, by name.
    """
    config, name = _load(path)
    experts = [f"{key} {config[key]}" for key in _EXPERTS if config.get(key)]
    if experts:
        raise UnusableModel(
            f"{name}: has experts ({experts[0]}), must be a dense decoder; name the sizes of its "
            "dense layers with --linear and --pair"
        )
    hidden, heads, inner = (
        _size(config, key, name)
        for key in ("hidden_size", "num_attention_heads", "intermediate_size")
    )
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    heads = _share(heads, tensor_parallel, "num_attention_heads", name)
    if kv_heads > tensor_parallel:
        kv_heads = _share(kv_heads, tensor_parallel, "num_key_value_heads", name)
    else:
        kv_heads = 1  # each GPU holds at least one
    q, kv = heads * head_dim, kv_heads * head_dim
    inner = _share(inner, tensor_parallel, "intermediate_size", name)
    biased = bool(config.get("attention_bias"))
    mlp_bias = bool(config.get("mlp_bias"))
    if fuse_mlp and not mlp_bias:
        gate_up = Layer("gate_up_proj", inner, hidden, pair=True)
    else:
        gate_up = Layer("gate_up_proj", 2 * inner, hidden, shards=2, bias=mlp_bias)
    layers = (
        Layer(
            "qkv_proj",
            q + 2 * kv,
            hidden,
            shards=3,
            bias=biased or config.get("model_type") in _BIASED_QKV,
        ),
        Layer("o_proj", hidden, q, bias=biased),
        gate_up,
        Layer("down_proj", hidden, inner, bias=mlp_bias),
    )
    attention = Attention(
        heads,
        kv_heads,
        head_dim,
        _windows(config),
        soft_cap=bool(config.get("attn_logit_softcapping")),
        rotary_dim=_rotary_dim(config, head_dim),
    )
    return Model(name, dtype or _dtype(config, name), layers, attention, hidden)


def _rotary_dim(config: dict[str, Any], head_dim: int) -> int:
    """0 where all of a head is turned."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return 0 if factor == 1.0 else int(head_dim * factor)


def _windows(config: dict[str, Any]) -> tuple[int, ...]:
    """Windows of a model's layers; both, where the file does not say which layers have one."""
    window = config.get("sliding_window") or 0
    if not window or config.get("use_sliding_window") is False:
        return (0,)
    kinds = set(config.get("layer_types") or ("full_attention",))
    return (0, window) if "full_attention" in kinds else (window,)


def explicit(linear: list[str], pair: list[str], dtype: Dtype | None = None) -> Model:
    """Layers of given sizes, each written ``"N,K"``.

    Raises:
        UnusableModel: something else is written, or sizes that no kernel takes.
    """
    layers = [Layer(f"linear {s}", *_pair_of(s, "--linear")) for s in linear]
    layers += [Layer(f"pair {s}", *_pair_of(s, "--pair"), pair=True) for s in pair]
    return Model("given sizes", dtype or "bfloat16", tuple(layers))


def numbers(text: str, option: str, form: str) -> list[int]:
    """The numbers of ``"1,2,3"``.

    Args:
        text: what came.
        option: where.
        form: what to write, e.g. ``"M,N,K[,L]"``; what is in brackets may be left out.

    Raises:
        UnusableModel: it has another form, or numbers that are not positive.
    """
    parts = text.split(",")
    least, most = form.partition("[")[0].count(",") + 1, form.count(",") + 1
    positive = all(p.strip().isdecimal() and int(p) > 0 for p in parts)
    if not (least <= len(parts) <= most and positive):
        raise UnusableModel(f"{option}: is {text!r}, must be {form}, all positive numbers")
    return [int(p) for p in parts]


def _pair_of(text: str, option: str) -> tuple[int, int]:
    n, k = numbers(text, option, "N,K")
    return n, k


def _load(path: Path) -> tuple[dict[str, Any], str]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise UnusableModel(
            f"{path}: cannot be read ({error.strerror or error}), must be a config.json or its "
            "directory; download the model's first"
        ) from error
    except ValueError as error:
        raise UnusableModel(f"{file}: is no JSON ({error}); download it again") from error
    if not isinstance(config, dict):
        raise UnusableModel(f"{file}: is no JSON object; give a Hugging Face config.json")
    text = config.get("text_config")
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return (text if isinstance(text, dict) else config), name


def _size(config: dict[str, Any], key: str, name: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnusableModel(
            f"{name}: {key} is {value!r}, must be a positive number; give the config.json of a "
            "decoder such as Llama, Mistral or Qwen, or sizes with --linear and --pair"
        )
    return value


def _share(size: int, gpus: int, key: str, name: str) -> int:
    if gpus < 1 or size % gpus:
        raise UnusableModel(
            f"{name}: --tensor-parallel is {gpus}, must divide {key} = {size}; choose another"
        )
    return size // gpus


def _dtype(config: dict[str, Any], name: str) -> Dtype:
    given = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    for dtype in DTYPES:
        if given == dtype:
            return dtype
    raise UnusableModel(
        f"{name}: dtype is {given!r}, must be {' or '.join(DTYPES)}; choose one with --dtype"
    )
