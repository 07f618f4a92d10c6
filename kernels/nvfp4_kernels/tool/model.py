"""A model's linear and attention layers, from Hugging Face's ``config.json``, on one GPU."""

import json
from pathlib import Path
from typing import Any

from nvfp4_kernels.nvfp4 import BLOCK_SIZE
from nvfp4_kernels.precompile.model import DTYPES, Attention, Dtype, Layer, Model

# They have a bias on q, k and v, and no field that says so.
_BIASED_QKV = ("qwen2",)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class UnusableModel(ValueError):
    """A model's configuration that gives no layers to build kernels for."""


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
            "dense layers with --linear and --gate-up"
        )
    hidden, heads, inner = (
        _size(config, key, name)
        for key in ("hidden_size", "num_attention_heads", "intermediate_size")
    )
    kv_heads = _size(config, "num_key_value_heads", name, default=heads)
    if heads % kv_heads:
        accepted = f"a divisor of num_attention_heads = {heads}"
        raise _malformed(name, "num_key_value_heads", kv_heads, accepted)
    head_dim = _size(config, "head_dim", name, default=hidden // heads)
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
        gate_up = Layer("gate_up_proj", inner, hidden, gate_up=True)
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
        _windows(config, name),
        soft_cap=bool(config.get("attn_logit_softcapping")),
        rotary_dim=_rotary_dim(config, head_dim, name),
    )
    for layer in layers:
        check_sizes(layer)
    return Model(name, dtype or _dtype(config, name), layers, attention, hidden)


def _rotary_dim(config: dict[str, Any], head_dim: int, name: str) -> int:
    """0 where all of a head is turned."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    if not isinstance(rope, dict):
        raise _malformed(name, key, rope, "an object")
    key = "partial_rotary_factor"
    factor = rope.get(key) or config.get(key) or 1.0
    if not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise _malformed(name, key, factor, "a number above 0, at most 1")
    return 0 if factor == 1.0 else int(head_dim * factor)


def _windows(config: dict[str, Any], name: str) -> tuple[int, ...]:
    """Windows of a model's layers; both, where the file does not say which layers have one."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return (0,)
    window = _size(config, "sliding_window", name)
    kinds = config.get("layer_types") or ["full_attention"]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise _malformed(name, "layer_types", kinds, "a list of strings")
    return (0, window) if "full_attention" in kinds else (window,)


def explicit(linear: list[str], gate_up: list[str], dtype: Dtype | None = None) -> Model:
    """Layers of given sizes, each written ``"N,K"``.

    Raises:
        UnusableModel: something else is written, or sizes that no kernel takes.
    """
    layers = [Layer(f"linear {s}", *_rows_and_k(s, "--linear")) for s in linear]
    layers += [Layer(f"gate_up {s}", *_rows_and_k(s, "--gate-up"), gate_up=True) for s in gate_up]
    for layer in layers:
        check_sizes(layer)
    return Model("given sizes", dtype or "bfloat16", tuple(layers))


def check_sizes(layer: Layer) -> None:
    """Refuse a layer that cannot be quantised.

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


def _rows_and_k(text: str, option: str) -> tuple[int, int]:
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


def _size(config: dict[str, Any], key: str, name: str, default: int | None = None) -> int:
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _malformed(name, key, value, "a positive number")
    return value


def _malformed(name: str, key: str, value: object, accepted: str) -> UnusableModel:
    return UnusableModel(
        f"{name}: {key} is {value!r}, must be {accepted}; give the config.json of a decoder such "
        "as Llama, Mistral or Qwen, or sizes with --linear and --gate-up"
    )


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
