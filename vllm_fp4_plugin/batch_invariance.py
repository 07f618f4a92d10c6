"""Batch invariance: a prompt's log-probabilities are bitwise independent of the rest of the batch.

``VLLM_BATCH_INVARIANT`` requests it. Our layers then get kernels whose result for a token depends
on no other token (the batch-invariant entries of ``KernelTable``). vLLM has its own kernels on CUDA
and none on a CPU, where this module computes vLLM's 16-bit products token by token. Features
without a batch-invariant path are refused before anything is loaded.
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
# vLLM's functions of 16-bit values whose torch results do not depend on the position in a tensor:
# all 65536 values of either dtype were tried. GELU is not such a function.
_ACTIVATIONS = ("silu", "swish")
_MAX_HIDDEN = 32768  # row length from which torch splits the sum of a single row in two
_NORM_OP = "rms_norm"  # vLLM's name of the kernel, which has one reduction order
_SMALL_HEAD, _LARGE_HEAD = 64, 192  # heads up to the first; windows with heads over the second

_vllm_initialise = vllm_determinism.init_batch_invariance
_vllm_product = utils.cpu_unquantized_gemm


class BatchInvarianceRefused(ValueError):
    """Error for a feature whose reduction order depends on the batch, if ``VARIABLE`` is set."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{VARIABLE}: is set, must not be with {what}; {remedy}, or unset it")


def is_wanted() -> bool:
    """Whether batch invariance is requested."""
    return bool(envs.VLLM_BATCH_INVARIANT)


def register() -> None:
    """Make vLLM's workers initialise batch invariance with ``_initialise``."""
    vllm_determinism.init_batch_invariance = _initialise


def _initialise() -> None:
    """Initialise batch invariance in a worker, before its model is built.

    vLLM's own initialisation runs, except for ``nvfp4-tc`` on a CPU: it replaces torch functions
    with Triton kernels, which do not run on a CPU. Of the replaced functions a dense model calls
    only sum and softmax over rows, which torch computes row by row on a CPU. Instead of vLLM's
    initialisation, 16-bit products are then computed token by token.
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
    """Keep vLLM's norm kernel in compiled graphs if batch invariance is requested.

    The norm that ``torch.compile`` generates has another reduction order: on an H100, the
    log-probabilities of 2 of 288 tokens depended on the batch; with vLLM's kernel, of none.

    Args:
        vllm_config: config of the engine; the norm's custom op is enabled, unless the user has
            enabled or disabled the op.
    """
    compilation = vllm_config.compilation_config
    requested = {f"{sign}{_NORM_OP}" for sign in "+-"} & set(compilation.custom_ops)
    if is_wanted() and not requested and not compilation.is_custom_op_enabled(_NORM_OP):
        compilation.custom_ops.append(f"+{_NORM_OP}")


def refuse(vllm_config: Any) -> None:
    """Refuse an engine whose answers would depend on the batch; layers are checked later.

    Raises:
        BatchInvarianceRefused: batch invariance was requested, and a feature rules it out.
    """
    if not is_wanted():
        return
    on_cpu = device_family(current_device()) == "cpu"
    for what, (holds, remedy) in _unsupported_reasons(vllm_config, on_cpu).items():
        if holds:
            raise BatchInvarianceRefused(what, remedy)


def _unsupported_reasons(vllm_config: Any, on_cpu: bool) -> dict[str, tuple[bool, str]]:
    """Features that rule out batch invariance: whether the engine has the feature, and a remedy."""
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
    """Check a model's norms before vLLM loads the weights and perhaps compiles the model.

    Raises:
        BatchInvarianceRefused: batch invariance was requested, and a model to be compiled has a
            norm other than vLLM's ``RMSNorm``, which ``keep_norms`` does not cover.
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
    """Check the backend of an attention layer, except in a report for another device.

    Raises:
        BatchInvarianceRefused: batch invariance was requested, and the backend's results for this
            layer depend on the batch.
    """
    if is_planned() or not is_wanted():
        return  # vLLM's choice for a planned device is not known
    backend = layer.get_attn_backend()
    if not backend.supports_batch_invariance():
        raise BatchInvarianceRefused(
            f"{prefix} on {backend.get_name()}",
            "serve with --attention-backend CUSTOM on a CPU or a B200, FLASH_ATTN on an H200",
        )
    if backend.get_name() == "FLASH_ATTN" and layer.impl.vllm_flash_attn_version == 3:
        found = _two_orders(layer)
        if found:
            raise BatchInvarianceRefused(
                f"{prefix}, which has {found}: FlashAttention 3 then takes as many keys at a time "
                "as suits the batch",
                "serve with --attention-backend TRITON_ATTN",
            )


def _two_orders(layer: Any) -> str:
    """Reason why FlashAttention 3's key block size depends on the batch; empty if it does not.

    The cases were found on an H100, by comparing a query run alone with the same query in batches.
    """
    if layer.kv_cache_dtype.startswith("fp8"):
        return "an FP8 cache"
    if layer.head_size <= _SMALL_HEAD:
        return f"heads of {layer.head_size}"
    if layer.head_size > _LARGE_HEAD and getattr(layer, "sliding_window", None) is not None:
        return f"a window and heads of {layer.head_size}"
    return ""


def check_experts(prefix: str) -> None:
    """Refuse a layer of experts; ``refuse`` misses models whose config does not mention experts.

    Raises:
        BatchInvarianceRefused: batch invariance was requested.
    """
    if is_wanted():
        raise BatchInvarianceRefused(f"{prefix}, a layer of experts", "serve another model")


def check_terms(prefix: str, terms: int, arch: str) -> None:
    """Check the number of NVFP4 terms of a layer's activations, for a kernel of family ``arch``.

    Raises:
        BatchInvarianceRefused: batch invariance was requested, and there are several terms on a
            GPU, where the layout of terms depends on the number of tokens.
    """
    if is_wanted() and terms > 1 and arch != "cpu":
        raise BatchInvarianceRefused(
            f"{prefix}, whose activations are {terms} terms on {arch}, in a layout that depends on "
            "the tokens",
            'give --additional-config \'{"nvfp4_tc": {"activation_terms": 1}}\'',
        )


def check_format(prefix: str, kind: str) -> None:
    """Refuse weights that are neither NVFP4 nor in 16 bits, and so served by vLLM's kernels.

    Raises:
        BatchInvarianceRefused: batch invariance was requested; whether these kernels are
            batch-invariant has not been checked.
    """
    if is_wanted():
        raise BatchInvarianceRefused(
            f"{prefix}, which is {kind} and {METHOD} leaves to vLLM",
            "quantise all layers to NVFP4 or leave them in 16 bits",
        )
