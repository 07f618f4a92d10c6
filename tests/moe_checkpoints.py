"""Checkpoints of tiny random mixtures of experts in NVFP4, with tensor names as on the hub."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from nvfp4_kernels.formats.nvfp4 import GLOBAL_RANGE, global_scale_of, quantize_weight
from tests import tiny_llama
from tests.catalogue import reference
from tests.mixed_checkpoints import (
    ALGORITHMS,
    E4M3_STEPS_OF_NVFP4,
    nvfp4_tensors,
    quantize,
    set_config,
)
from tests.moe_reference import Moe, layer_number
from vllm_fp4_plugin.formats import FORMATS
from vllm_fp4_plugin.formats.kind import Kind

_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
}


def qwen3(**changes: Any) -> PreTrainedConfig:
    """Qwen 3: eight experts, softmax routing; halved by two ranks, no size is divisible by 128."""
    settings = _SIZES | {
        "num_experts": 8,
        "moe_intermediate_size": 96,
        "intermediate_size": 192,
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(**(settings | changes))


def glm4(**changes: Any) -> PreTrainedConfig:
    """GLM 4: a dense layer, then layers with a shared expert; sigmoid routing with a bias."""
    settings = _SIZES | {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 96,
        "intermediate_size": 192,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
    }
    return Glm4MoeConfig(**(settings | changes))


def mixtral(**changes: Any) -> PreTrainedConfig:
    """Mixtral: projections called w1, w2 and w3 in a module ``block_sparse_moe``."""
    settings = _SIZES | {"num_local_experts": 4, "intermediate_size": 160}
    return MixtralConfig(**(settings | changes))


def minimax(**changes: Any) -> PreTrainedConfig:
    """MiniMax: sigmoid routing without groups, for which vLLM has no router on CPU."""
    settings = _SIZES | {
        "num_local_experts": 4,
        "intermediate_size": 96,
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "attn_type_list": [1, 1],
    }
    return MiniMaxM2Config(**(settings | changes))


def deepseek(**changes: Any) -> PreTrainedConfig:
    """DeepSeek: latent attention; a dense layer, then two groups of experts and a shared expert."""
    settings = {name: size for name, size in _SIZES.items() if name != "head_dim"} | {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 96,
        "intermediate_size": 192,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",  # as in the hub's configs; transformers knows no other
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    }
    # In a process that has loaded a V3.2 model, vLLM gives this class the type of V3.2.
    DeepseekV3Config.model_type = "deepseek_v3"
    return DeepseekV3Config(**(settings | changes))


def qwen3_next(**changes: Any) -> PreTrainedConfig:
    """Qwen 3 Next: linear attention, and experts with a gated shared expert."""
    settings = _SIZES | {
        "num_experts": 8,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 96,
        "intermediate_size": 192,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "full_attention_interval": 2,
    }
    return Qwen3NextConfig(**(settings | changes))


def write(
    directory: Path,
    model: PreTrainedConfig | Path,
    kinds: Mapping[str, Kind],
    *,
    modelopt: bool = True,
    joined: bool = False,
) -> Moe:
    """Write a model with some quantised linears.

    Args:
        directory: folder for the checkpoints.
        model: 16-bit checkpoint, or config of a random model.
        kinds: kinds of the linears by parts of their names, e.g. ``{"experts": Kind.NVFP4}``;
            compressed-tensors' format supports one kind only. FP8 inputs have calibrated scales.
        modelopt: whether the format is ModelOpt's, not that of compressed-tensors.
        joined: whether an expert's gate and up share one global scale.
    """
    plain = model if isinstance(model, Path) else save_random(directory / "plain", model)
    originals = load_file(plain / "model.safetensors")
    scales = calibrated(plain) if {Kind.NVFP4, Kind.FP8} & set(kinds.values()) else {}
    tensors = {}
    chosen: dict[str, Kind] = {}
    ignore = []
    for name, tensor in originals.items():
        tensors[name] = tensor
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or module == name or module.endswith("embed_tokens"):
            continue
        kind = next((k for part, k in kinds.items() if f".{part}." in name), None)
        if kind is None:
            ignore.append(module)
            continue
        del tensors[name]
        chosen[module] = kind
        if kind.is_nvfp4:
            quantised = quantize_weight(tensor, _joint_scale(module, originals) if joined else None)
            scale = scales[module] if kind is Kind.NVFP4 else None
            parts = nvfp4_tensors(quantised, scale, modelopt=modelopt)
        else:
            parts = quantize(kind, tensor, modelopt=modelopt).tensors
        tensors |= {f"{module}.{part}": t for part, t in parts.items()}
        if kind is Kind.FP8:
            tensors[f"{module}.input_scale"] = scales[module] * E4M3_STEPS_OF_NVFP4
    path = _copy(plain, directory / "model", tensors)
    set_config(path, _config(chosen, ignore, modelopt=modelopt))
    reference.decode(path, directory / "decoded")
    rounded = {m: s for m, s in scales.items() if chosen.get(m) is Kind.NVFP4}
    return Moe(path, directory / "decoded", rounded)


def _config(kinds: Mapping[str, Kind], ignore: list[str], *, modelopt: bool) -> dict[str, Any]:
    if len(set(kinds.values())) > 1:
        return {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "exclude_modules": ignore,
            "quantized_layers": {m: {"quant_algo": ALGORITHMS[kind]} for m, kind in kinds.items()},
        }
    weight_only = set(kinds.values()) == {Kind.NVFP4_A16}
    chosen = FORMATS["modelopt" if modelopt else "compressed-tensors"]
    return chosen.config(ignore, weight_only=weight_only, fp8_kv=False)


def _joint_scale(module: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Joint global scale of an expert's gate and up; None for other projections."""
    expert, _, projection = module.rpartition(".")
    pair = next((p for p in (("gate_proj", "up_proj"), ("w1", "w3")) if projection in p), None)
    if pair is None:
        return None
    return global_scale_of(torch.cat([tensors[f"{expert}.{each}.weight"] for each in pair]))


def change(checkpoint: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of a checkpoint with the function ``edit``."""
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def calibrated(plain: Path) -> dict[str, Tensor]:
    """Calibrated input scales of a model's experts, by the projections' names on disk.

    The input of each expert's second product has its own scale.
    """
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    seen: dict[str, Tensor] = {}
    with _inputs_of_experts(model, seen), torch.inference_mode():
        model(input_ids=_text())
    tensors = load_file(plain / "model.safetensors")
    found: dict[str, Tensor] = {}
    for name in tensors:
        layer, dot, rest = name.removesuffix(".weight").partition(".experts.")
        if not dot:
            continue
        number, _, projection = rest.partition(".")
        x = next(x for key, x in seen.items() if layer_number(key) == layer_number(layer))
        if projection in ("down_proj", "w2"):
            names = ("w1", "w3") if projection == "w2" else ("gate_proj", "up_proj")
            gate, up = (
                x @ tensors[f"{layer}.experts.{number}.{each}.weight"].float().mT for each in names
            )
            x = torch.nn.functional.silu(gate) * up
        found[name.removesuffix(".weight")] = x.abs().amax() / GLOBAL_RANGE
    return found


@contextmanager
def _inputs_of_experts(model: Any, seen: dict[str, Tensor]) -> Iterator[None]:
    def note(name: str) -> Any:
        return lambda _, given: seen.update({name: given[0].flatten(0, -2)})

    hooks = [
        module.register_forward_pre_hook(note(name))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    yield
    for hook in hooks:
        hook.remove()


def _text() -> Tensor:
    return torch.tensor([tiny_llama.tokenizer().encode(tiny_llama.TEXT)])


def save_random(directory: Path, config: PreTrainedConfig) -> Path:
    """Save a random bfloat16 model in which every expert matters and the shards' gains differ."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    gains = {"embed": 16.0, "k_proj": 2.0, "lm_head": 6.0, "gate.weight": 40.0}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:
            steps = torch.linspace(1, 2, len(parameter)).view(-1, 1, 1)
            parameter.data.mul_(2.0 * steps)
            if "gate_up" in name:
                parameter.data[:, parameter.shape[1] // 2 :].mul_(2.5)
        elif parameter.ndim == 2:
            parameter.data.mul_(next((g for key, g in gains.items() if key in name), 2.0))
    model.to(torch.bfloat16).save_pretrained(directory)
    tiny_llama.tokenizer().save_pretrained(directory)
    return directory


def _copy(plain: Path, directory: Path, tensors: dict[str, Tensor]) -> Path:
    """Copy a model's files, with ``tensors`` in place of the model's tensors."""
    directory.mkdir()
    for file in plain.iterdir():
        if file.suffix == ".json" and not file.name.startswith("model.safetensors"):
            (directory / file.name).write_bytes(file.read_bytes())
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
