"""Batch invariance: a prompt's log-probabilities to the bit, whatever else is in the batch.

``VLLM_BATCH_INVARIANT`` asks for it. Layers of ours then get kernels of which a token's result
depends on no other token (``KernelTable``'s batch-invariant ones); vLLM has its own on CUDA and
none on a CPU, where its 16-bit products are taken token by token here. What neither makes so is
refused before anything is loaded.
"""

from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import CompilationMode, get_current_vllm_config
from vllm.model_executor.determinism import batch_invariant as vllm_determinism
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms import current_platform

from nvfp4_kernels.devices import device_family
from nvfp4_kernels.each_row import by_row
from vllm_fp4_plugin.device import current_device, is_planned
from vllm_fp4_plugin.options import METHOD

VARIABLE = "VLLM_BATCH_INVARIANT"
# vLLM's functions of 16-bit values that torch gives the same bits wherever in a tensor they lie:
# all 65536 values of either dtype were tried. GELU is none of them.
_ACTIVATIONS = ("silu", "swish")
_MAX_HIDDEN = 32768  # elements of a row, from which on torch cuts the sum of a single one in two
_NORM_OP = "rms_norm"  # vLLM's name for it, whose kernel has one order
_SMALL_HEAD, _LARGE_HEAD = 64, 192  # heads up to the one, windows with more than the other

_vllm_initialise = vllm_determinism.init_batch_invariance
_vllm_product = utils.cpu_unquantized_gemm


class BatchInvarianceRefused(ValueError):
    """``VLLM_BATCH_INVARIANT`` is set, and something has an order of sums that the batch picks."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{VARIABLE}: is set, must not be with {what}; {remedy}, or unset it")


def is_wanted() -> bool:
    """Whether answers may not depend on the batch."""
    return bool(envs.VLLM_BATCH_INVARIANT)


def register() -> None:
    """Have workers on a CPU be initialised for batch invariance by us, see ``_initialise``."""
    vllm_determinism.init_batch_invariance = _initialise


def _initialise() -> None:
    """Prepare a worker of an engine that is about to be built.

    vLLM replaces torch's functions by Triton kernels, which a CPU does not have. Of them a dense
    model of ours calls sums and softmax of rows, which torch computes row by row there; 16-bit
    products it takes token by token.
    """
    ours = False
    if current_platform.is_cpu() and is_wanted():
        quantization: Any = get_current_vllm_config().quant_config
        ours = quantization is not None and quantization.get_name() == METHOD
    utils.cpu_unquantized_gemm = _each_token if ours else _vllm_product
    if not ours:
        _vllm_initialise()


def _each_token(
    layer: torch.nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    def product(row: Tensor) -> Tensor:
        return _vllm_product(layer, row.unsqueeze(0), weight, bias).squeeze(0)

    if not x.numel():
        return _vllm_product(layer, x, weight, bias)
    width = product(x.reshape(-1, x.shape[-1])[0]).shape[-1]
    return by_row(product, x, width)


def keep_norms(vllm_config: Any) -> None:
    """Keep vLLM's norm kernel in what it compiles: torch's would be of an order of its own.

    On an H100 2 of 288 tokens differed with torch's, and none with vLLM's.

    Args:
        vllm_config: the engine's; its custom ops change, unless the user has said of norms.
    """
    compilation = vllm_config.compilation_config
    said = {f"{sign}{_NORM_OP}" for sign in "+-"} & set(compilation.custom_ops)
    if is_wanted() and not said and not compilation.is_custom_op_enabled(_NORM_OP):
        compilation.custom_ops.append(f"+{_NORM_OP}")


def refuse(vllm_config: Any) -> None:
    """Refuse an engine of which an answer would depend on the batch; layers are asked later.

    Raises:
        BatchInvarianceRefused: it was asked for, and something rules it out.
    """
    if not is_wanted():
        return
    on_cpu = device_family(current_device()) == "cpu"
    for what, (holds, remedy) in _obstacles(vllm_config, on_cpu).items():
        if holds:
            raise BatchInvarianceRefused(what, remedy)


def _obstacles(vllm_config: Any, on_cpu: bool) -> dict[str, tuple[bool, str]]:
    """Reasons against it, whether an engine has them, and what to do instead."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text = model.hf_text_config
    activation = getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None)
    other = "serve another model"
    return {
        "mixtures of experts, whose tiles of tokens the router fills": (model.is_moe, other),
        "layers of linear attention or state spaces": (
            model.is_hybrid or model.attn_type not in ("decoder",),
            other,
        ),
        "MLA": (model.use_mla, other),
        "images, sound or video, whose encoders take several at once": (
            model.is_multimodal_model,
            other,
        ),
        f"--runner {model.runner_type}": (model.runner_type != "generate", "generate text"),
        "speculative decoding": (
            vllm_config.speculative_config is not None,
            "leave --speculative-config out",
        ),
        "LoRA": (vllm_config.lora_config is not None, "leave --enable-lora out"),
        "torch.compile on a CPU, whose sums nobody has looked at": (
            on_cpu and not model.enforce_eager,
            "serve with --enforce-eager",
        ),
        "norms that torch.compile makes, in an order of its own": (
            not (on_cpu or vllm_config.compilation_config.is_custom_op_enabled(_NORM_OP)),
            f"""add '+{_NORM_OP}' to "custom_ops" of --compilation-config""",
        ),
        "several ranks on a CPU, whose all-reduce vLLM does not fix": (
            on_cpu and parallel.world_size > 1,
            "serve on one",
        ),
        f"rows of more than {_MAX_HIDDEN} elements on a CPU": (
            on_cpu and model.get_hidden_size() > _MAX_HIDDEN,
            other,
        ),
        f"hidden_act {activation} on a CPU, which torch rounds by where a value lies": (
            on_cpu and activation not in _ACTIVATIONS,
            other,
        ),
    }


def check_norms(model: torch.nn.Module) -> None:
    """Check the norms of a model that vLLM is about to fill, and to compile perhaps.

    Raises:
        BatchInvarianceRefused: it was asked for, and one is not of those that ``keep_norms`` keeps.
    """
    if not is_wanted():
        return
    if get_current_vllm_config().compilation_config.mode == CompilationMode.NONE:
        return
    for prefix, module in model.named_modules():
        name = type(module).__name__
        if "norm" in name.lower() and not isinstance(module, RMSNorm):
            raise BatchInvarianceRefused(
                f"{prefix}, a {name} that torch.compile orders anew", "serve with --enforce-eager"
            )


def check_attention(prefix: str, layer: Any) -> None:
    """Check the backend that a layer of attention got.

    Raises:
        BatchInvarianceRefused: it was asked for, and the backend does not have it.
    """
    if is_planned() or not is_wanted():
        return  # vLLM's choice of what is planned is not known
    backend = layer.get_attn_backend()
    if not backend.supports_batch_invariance():
        raise BatchInvarianceRefused(
            f"{prefix} on {backend.get_name()}",
            "serve with --attention-backend CUSTOM on a CPU or a B200, FLASH_ATTN on an H200",
        )
    if backend.get_name() == "FLASH_ATTN" and device_family(current_device()) == "sm_90":
        found = _two_orders(layer)
        if found:
            raise BatchInvarianceRefused(
                f"{prefix}, which has {found}: FlashAttention 3 then takes as many keys at a time "
                "as suits the batch",
                "serve with --attention-backend TRITON_ATTN",
            )


def _two_orders(layer: Any) -> str:
    """Reason that FlashAttention 3 sums over keys in blocks that the batch decides; else empty.

    Found on an H100, with a query alone and the same one in batches.
    """
    if layer.kv_cache_dtype.startswith("fp8"):
        return "an FP8 cache"
    if layer.head_size <= _SMALL_HEAD:
        return f"heads of {layer.head_size}"
    if layer.head_size > _LARGE_HEAD and getattr(layer, "sliding_window", None) is not None:
        return f"a window and heads of {layer.head_size}"
    return ""


def check_experts(prefix: str) -> None:
    """Check a layer of experts, of a model whose config does not tell of them.

    Raises:
        BatchInvarianceRefused: it was asked for.
    """
    if is_wanted():
        raise BatchInvarianceRefused(f"{prefix}, a layer of experts", "serve another model")


def check_terms(prefix: str, terms: int, arch: str) -> None:
    """Check the number of NVFP4 terms of a layer's activations.

    Raises:
        BatchInvarianceRefused: it was asked for, and the terms' layout depends on the tokens.
    """
    if is_wanted() and terms > 1 and arch != "cpu":
        raise BatchInvarianceRefused(
            f"{prefix}, whose activations are {terms} terms on {arch}, in a layout that depends on "
            "the tokens",
            'give --additional-config \'{"nvfp4_tc": {"activation_terms": 1}}\'',
        )


def check_format(prefix: str, kind: str) -> None:
    """Check the format of a layer's weights that are neither NVFP4 nor in 16 bits.

    Raises:
        BatchInvarianceRefused: it was asked for; nobody has looked at vLLM's kernels for it.
    """
    if is_wanted():
        raise BatchInvarianceRefused(
            f"{prefix}, which is {kind} and {METHOD} leaves to vLLM",
            "quantise all layers to NVFP4 or leave them in 16 bits",
        )
