"""Kernel parameters of an MoE model on a GPU, from Hugging Face's ``config.json``."""

from typing import NamedTuple

from nvfp4_kernels.activation import SILU, Activation
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from nvfp4_kernels.gemm.grouped.tile_tokens import ExpertSizes
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.precompile.experts_layer import Choice, Experts
from nvfp4_kernels.precompile.model import Dtype, Layer, Model
from nvfp4_kernels.tool.config_file import ModelConfig, UnusableModel
from nvfp4_kernels.tool.model import attention_layers, check_sizes, mlp_layers, number_of_experts

# Families whose attention is that of a dense decoder. Of others (latent, linear, gated, …) much is
# vLLM's, and no field says how wide the projections are.
_ORDINARY_ATTENTION = (
    "glm4_moe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_vl_moe_text",
)
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k")
_FUNCTIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act")
_GATED = {
    "silu": SILU,
    "swish": SILU,
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "gelu_pytorch_tanh": Activation("gelu_tanh"),
}
_UNGATED = {"relu2": Activation("relu2")}
_STEP_LIMIT = 7  # the only one with a vLLM kernel
# GPT-OSS: has biases; its ``hidden_act: silu`` is clamped SwiGLU.
_GPT_OSS = {"gpt_oss": Activation("swigluoai_uninterleave", 7.0, 1.702, 1.0)}
_WEIGHT_ON_INPUT = ("llama4_text",)
# Families whose router is a softmax without groups, of 16-bit logits, renormalised as
# norm_topk_prob says or, where the config has none, as here.
_SOFTMAX = {
    "gpt_oss": True,
    "mixtral": True,
    "olmoe": False,
    "qwen2_moe": False,
    "qwen3_moe": False,
    "qwen3_next": True,
    "qwen3_vl_moe_text": True,
}
# Whose router is a sigmoid with a bias, in groups, of float32 logits; the factor of its weights is
# vLLM's to apply.
_SIGMOID = ("glm4_moe",)


class Mixture(NamedTuple):
    """Layers of a model, MoE or dense.

    Attributes:
        dense: linear and attention layers.
        experts: distinct MoE layers, with 16-bit inputs and unpadded widths; empty if dense.
        left_out: description of the layers that the config does not define, else empty.
    """

    dense: Model
    experts: tuple[Experts, ...]
    left_out: str


def read_mixture(
    config: ModelConfig,
    *,
    tensor_parallel: int,
    expert_parallel: int,
    dtype: Dtype | None,
    fuse_mlp: bool,
) -> Mixture:
    """Read the layers of a decoder with experts.

    Args:
        config: config of the model.
        tensor_parallel: GPUs that share each layer.
        expert_parallel: GPUs that share the experts, each expert whole on one GPU; 1: each expert
            is split by tensor parallelism.
        dtype: overrides the model's dtype.
        fuse_mlp: whether dense layers compute the gate and up projections and SiLU in one kernel.

    Raises:
        UnusableModel: a size is missing or not divisible by the number of GPUs, or the activation
            is unsupported.
    """
    hidden, dtype = config.number("hidden_size"), dtype or config.dtype
    activations, gated = _activations(config)
    fuse = fuse_mlp and activations == [SILU]
    layers: list[Layer] = []
    for where, inner in _mlp_widths(config).items():
        width = config.share(inner, tensor_parallel, f"{where} MLP's width")
        if gated:
            layers += mlp_layers(
                "shared experts'" if where else "", width, hidden, config, fuse=fuse
            )
    attention, left_out = None, ""
    if config.model_type in _ORDINARY_ATTENTION:
        attention, projections = attention_layers(config, tensor_parallel)
        layers = [*projections, *layers]
    else:
        left_out = f"attention of {config.model_type or 'this family'} and its projections"
    for layer in layers:
        check_sizes(layer)
    experts = _experts(config, activations, gated, tensor_parallel, expert_parallel, dtype)
    return Mixture(Model(config.name, dtype, tuple(layers), attention, hidden), experts, left_out)


def _experts(
    config: ModelConfig,
    activations: list[Activation],
    gated: bool,
    tensor_parallel: int,
    expert_parallel: int,
    dtype: Dtype,
) -> tuple[Experts, ...]:
    """MoE layers: one per activation and distinct number of experts on a GPU."""
    total = number_of_experts(config)
    width = config.number("moe_intermediate_size", "intermediate_size")
    hidden = config.number("moe_latent_size", default=config.number("hidden_size"))
    if expert_parallel == 1:
        width = config.share(width, tensor_parallel, "the experts' width")
    if expert_parallel > total:
        raise UnusableModel(
            f"{config.name}: --expert-parallel is {expert_parallel}, must be at most its {total} "
            "experts; choose another"
        )
    for name, size in (("H", hidden), ("I", width)):
        if size % BLOCK_SIZE:
            raise UnusableModel(
                f"{config.name}: {name} of its experts is {size}, must be a multiple of "
                f"{BLOCK_SIZE}; use fewer GPUs for each, or --expert-parallel"
            )
    held = sorted({-(-total // expert_parallel), total // expert_parallel})
    return tuple(
        Experts(
            ExpertSizes(hidden, width, count, total, gated),
            config.number(*_TOP_K),
            activation,
            dtype,
            "16-bit",
            bias=config.model_type in _GPT_OSS,
            mapped=total if expert_parallel > 1 else 0,
            weight_on_input=config.model_type in _WEIGHT_ON_INPUT,
            choice=_choice(config, dtype),
        )
        for activation in activations
        for count in held
    )


def _choice(config: ModelConfig, dtype: Dtype) -> Choice | None:
    """Router top-k from logits; None if the model family's config does not define the router."""
    fields, top_k = config.fields, config.number(*_TOP_K)
    if config.model_type in _SOFTMAX:
        renormalize = bool(fields.get("norm_topk_prob", _SOFTMAX[config.model_type]))
        return Choice(Router(top_k, renormalize=renormalize), dtype, False)
    if config.model_type in _SIGMOID:
        groups = config.number("n_group", default=1), config.number("topk_group", default=1)
        renormalize = bool(fields.get("norm_topk_prob", True))
        return Choice(Router(top_k, "sigmoid", renormalize, *groups), "float32", True)
    return None


def _activations(config: ModelConfig) -> tuple[list[Activation], bool]:
    """Distinct activations of the experts in all layers, and whether experts are gated."""
    fields = config.fields
    if config.model_type in _GPT_OSS:
        return [_GPT_OSS[config.model_type]], True
    key = next((key for key in _FUNCTIONS if fields.get(key)), _FUNCTIONS[0])
    name = fields.get(key) or "silu"
    if not isinstance(name, str):
        raise config.malformed(key, name, "the name of an activation")
    if name in _UNGATED:
        return [_UNGATED[name]], False
    if name == "situ":
        beta, linear_beta = (
            _factor(config, f"activation_situ_{of}") for of in ("beta", "linear_beta")
        )
        return [Activation("situ", linear_beta, beta or 1.0)], True
    limit = _factor(config, "swiglu_limit")
    if config.model_type.startswith("minimax_m3"):
        alpha, beta = (_factor(config, f"swiglu_{of}") for of in ("alpha", "beta"))
        return [Activation("swigluoai_uninterleave", limit, alpha or 1.0, beta or 0.0)], True
    if name not in _GATED:
        accepted = ", ".join((*_GATED, "situ", *_UNGATED))
        raise UnusableModel(
            f"{config.name}: {key} is {name!r}, must be one of {accepted} for experts; name the "
            "sizes of its dense layers with --linear and --gate-up"
        )
    activation = _GATED[name]._replace(limit=limit)
    limits = fields.get("swiglu_limits") or []  # of Step 3, one for each layer
    if not isinstance(limits, list) or any(each not in (None, 0, _STEP_LIMIT) for each in limits):
        raise config.malformed("swiglu_limits", limits, f"a list of 0 and {_STEP_LIMIT}")
    stepped = [Activation("swiglustep", _STEP_LIMIT)] * any(limits)
    return [activation, *stepped], True


def _factor(config: ModelConfig, key: str) -> float | None:
    """Positive parameter of an activation; None if missing or not positive."""
    value = config.fields.get(key)
    if not isinstance(value, int | float | None):
        raise config.malformed(key, value, "a number")
    return float(value) if value and value > 0 else None


def _mlp_widths(config: ModelConfig) -> dict[str, int]:
    """Widths of the MLPs other than routed experts: dense layers (``""``) and shared experts."""
    fields, widths = config.fields, {}
    has_dense = any(
        fields.get(key) for key in ("first_k_dense_replace", "mlp_only_layers", "num_dense_layers")
    )
    if config.model_type == "llama4_text":
        # One shared expert, as wide as a routed expert.
        widths["shared"] = config.number("intermediate_size")
        if config.number("interleave_moe_layer_step", default=1) > 1:
            widths[""] = config.number("intermediate_size_mlp")
    elif (
        config.model_type == "gemma4_text"
        or has_dense
        or config.number("decoder_sparse_step", default=1) > 1
    ):
        widths[""] = config.number("intermediate_size")
    shared = next(filter(fields.get, ("n_shared_experts", "num_shared_experts")), None)
    if fields.get("shared_expert_intermediate_size"):
        widths["shared"] = config.number("shared_expert_intermediate_size")
    elif shared:
        widths["shared"] = config.number(shared) * config.number("moe_intermediate_size")
    return widths
