"""Choice of an indexer's key format, and of the kernels that serve it: ours or vLLM's."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.utils import deep_gemm

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.devices import device_family
from nvfp4_kernels.dispatch import Kernel, KernelTable, NoKernelError
from nvfp4_kernels.indexer.arguments import check_head_dim, check_top_k
from nvfp4_kernels.indexer.formats import Format, format_of
from nvfp4_kernels.indexer.kernels import (
    GATHER_K_KERNELS,
    QUANTIZE_Q_KERNELS,
    SCORE_TOPK_KERNELS,
    STORE_K_KERNELS,
)
from vllm_fp4_plugin.device import current_device, is_planned
from vllm_fp4_plugin.options import KEY, METHOD, Options

OPTION = f"{KEY}.indexer_format"
# Families on which vLLM 0.33 writes an FP8 key's scale as four equal exponents. Only a report for
# another device reads the set: vLLM's ``mqa_logits_use_mx_scales`` answers for the local device.
EXPONENT_SCALE_FAMILIES = {"sm_100"}


class UnsupportedIndexer(ValueError):
    """Error for a requested key format that our kernels do not support for the model's indexer."""


@dataclass(frozen=True)
class IndexerTraits:
    """Properties of an indexer, as requested by a model's layer.

    Attributes:
        native: key format that vLLM would use.
        head_dim: D, number of elements of a key.
        top_k: number of keys to select per query.
        quant_block_size: number of elements per scale in vLLM's FP8 format.
        stored_by_model: whether the model quantises and stores keys before it calls the indexer.
        two_level: whether top-k is restricted to candidate blocks from an earlier selection.
    """

    native: str
    head_dim: int
    top_k: int
    quant_block_size: int
    stored_by_model: bool
    two_level: bool


def choose(layer: IndexerTraits, vllm_config: Any) -> tuple[Format | None, str]:
    """Choose the key format, or None to leave the layer to vLLM's kernels; also return the reason.

    Raises:
        InvalidOption: see ``Options.of``.
        UnsupportedIndexer: our kernels cannot serve the format that the user requests; the message
            names reason and remedy.
    """
    requested = Options.of(vllm_config).indexer_format
    if requested is None and vllm_config.model_config.quantization != METHOD:
        return None, f"the model is not served with {METHOD}, and {OPTION} is not set"
    fmt = format_of(requested or layer.native)
    reasons = list(_unsupported_reasons(layer, fmt, vllm_config))
    if not reasons:
        return fmt, "by default" if requested is None else OPTION
    if requested is None:
        return None, "; ".join(reasons)
    raise UnsupportedIndexer(
        f"{OPTION}: is {requested!r}, which cannot be served here: {'; '.join(reasons)}; "
        "or leave the option out, for vLLM's own kernels"
    )


def scoring_kernel(fmt: Format) -> Kernel:
    """Kernel that scores keys and selects the top-k, for logs and reports."""
    return SCORE_TOPK_KERNELS.select(current_device(), fmt.name)


def _unsupported_reasons(layer: IndexerTraits, fmt: Format, vllm_config: Any) -> Iterator[str]:
    try:
        check_head_dim("head_dim", layer.head_dim)
        check_top_k(layer.top_k)
    except InvalidArgument as invalid:
        yield str(invalid)
    if fmt.name == layer.native == "fp8" and layer.head_dim != layer.quant_block_size:
        yield (
            f"head_dim: is {layer.head_dim}, with fp8 must be {layer.quant_block_size}, so that a "
            "key has one scale; choose another format"
        )
    if fmt.name == "fp8" and layer.stored_by_model and has_exponent_scales():
        yield (
            "the model's layer stores FP8 keys with four UE8M0 scales on this GPU, must be one "
            'float32 scale; serve with --attention-config \'{"indexer_kv_dtype": "mxfp4"}\''
        )
    if layer.stored_by_model and fmt.name != layer.native:
        yield _native_remedy(layer.native, fmt.name)
    if layer.two_level:
        yield "choosing keys among candidate blocks (DeepSeek V4.1) is not supported"
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name)
        if size > 1:
            option = "--" + name.replace("_", "-")
            yield f"{option} is {size}, must be 1; parallelise over tensors or experts"
    dtype = vllm_config.model_config.dtype
    if not layer.stored_by_model and dtype != torch.bfloat16:
        yield f"dtype is {dtype}, must be torch.bfloat16; serve with --dtype bfloat16"
    for table in _tables(layer):
        try:
            table.select(current_device(), fmt.name)
        except NoKernelError as error:
            yield str(error)
            return  # other tables give the same error


def has_exponent_scales() -> bool:
    """Whether vLLM writes an FP8 key's scale as four equal exponents.

    vLLM is asked about the local device, ``EXPONENT_SCALE_FAMILIES`` in a report for another one.
    """
    tells = getattr(deep_gemm, "mqa_logits_use_mx_scales", None)
    if tells is None:
        return False
    if is_planned():
        return device_family(current_device()) in EXPONENT_SCALE_FAMILIES
    return bool(tells())


def _native_remedy(native: str, requested: str) -> str:
    reason = f"the model's layer has stored its keys in {native} already"
    if requested in ("fp8", "mxfp4"):
        return f'{reason}; serve with --attention-config \'{{"indexer_kv_dtype": "{requested}"}}\''
    return f"{reason}; choose {native}"


def _tables(layer: IndexerTraits) -> list[KernelTable]:
    tables = [GATHER_K_KERNELS, SCORE_TOPK_KERNELS]
    if not layer.stored_by_model:
        tables += [QUANTIZE_Q_KERNELS, STORE_K_KERNELS]
    return tables
