"""Kernels that ``build`` must compile: for a model, or for the sizes of given layers."""

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from nvfp4_kernels.precompile.attention_sm90 import decode_kernels
from nvfp4_kernels.precompile.attention_sm100 import (
    CACHES,
    Cache,
    attention_kernels,
    hands_over,
)
from nvfp4_kernels.precompile.experts import experts_kernels
from nvfp4_kernels.precompile.experts_layer import Experts
from nvfp4_kernels.precompile.experts_layer import Inputs as ExpertInputs
from nvfp4_kernels.precompile.fp8_rows_sm90 import norm_kernels as fp8_norm_kernels
from nvfp4_kernels.precompile.linear_sm90 import fp8_kernels, weight_only_kernels
from nvfp4_kernels.precompile.linear_sm100 import ACTIVATIONS, block_scaled_kernels
from nvfp4_kernels.precompile.model import PAGE_SIZE, quantizing_mlps
from nvfp4_kernels.precompile.norm_rotary_sm90 import norm_rotary_kernels
from nvfp4_kernels.precompile.norm_sm100 import norm_kernels
from nvfp4_kernels.precompile.rotary_store import rotary_store_kernels
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.tool.config_file import UnusableModel, load_config
from nvfp4_kernels.tool.mixture import Mixture, read_mixture
from nvfp4_kernels.tool.model import dense_model, explicit, number_of_experts
from nvfp4_kernels.tool.options import ActivationName, CacheName, DtypeName, dtype_of
from nvfp4_kernels.tool.quantized_inputs import EITHER, Inputs, quantized_inputs


def page_size_of(block_size: int | None) -> int:
    """Number of keys per page of the KV cache: ``block_size``, or vLLM's default if None.

    Raises:
        UnusableModel: ``block_size`` is not a power of two.
    """
    page_size = PAGE_SIZE if block_size is None else block_size
    if page_size & (page_size - 1):
        raise UnusableModel(
            f"--block-size: is {page_size}, must be a power of two; choose 16, 32, 64 or 128"
        )
    return page_size


class Parallel(NamedTuple):
    """Numbers of GPUs.

    Attributes:
        tensor: GPUs that share each layer.
        expert: GPUs that share the experts, each expert whole on one GPU.
    """

    tensor: int
    expert: int


class Wanted(NamedTuple):
    """Model, batches and options that kernels are compiled for; None: option not given.

    Attributes:
        mixture: layers of the model.
        max_tokens: maximum number of tokens in a batch.
        sms: SMs of the GPU.
        page_size: keys per page of the KV cache.
        of_model: quantisation of layer inputs by the model's config.
        activation, terms: options that override ``of_model``.
        kv_cache: dtypes of the KV cache.
        batch_invariant: whether the server is batch-invariant.
    """

    mixture: Mixture
    max_tokens: int
    sms: int
    page_size: int
    of_model: tuple[Inputs, ...]
    activation: ActivationName | None
    terms: int | None
    kv_cache: CacheName | None
    batch_invariant: bool = False


def check_batch_invariant(wanted: Wanted) -> None:
    """Check that a server with batch invariance would not refuse the model.

    Raises:
        UnusableModel: the model has experts, or inputs of several terms.
    """
    if wanted.mixture.experts:
        raise UnusableModel(
            "--batch-invariant: goes with dense models, this one has experts, which a server with "
            "VLLM_BATCH_INVARIANT refuses; leave it out"
        )
    terms = max(inputs.terms for inputs in inputs_of(wanted))
    if terms > 1:
        raise UnusableModel(
            f"--batch-invariant: goes with inputs of one term, these have {terms}, whose layout "
            "depends on the number of tokens; give --terms 1"
        )


def _sm90_kernels(wanted: Wanted) -> dict[KernelSpec, list[str]]:
    """Kernels of linear layers, experts, decode attention, norms and rotary embeddings.

    Raises:
        UnusableModel: an option is given on which no kernel depends: activations are not NVFP4 on
            sm_90, and FP8 caches are left to vLLM.
    """
    if wanted.activation is not None and not wanted.activation.is_option:
        raise UnusableModel(
            f"--activation: is {str(wanted.activation)!r}, must be fp8 or 16-bit for sm_90, whose "
            "activations are not NVFP4; leave it out for what the model says"
        )
    if wanted.terms is not None:
        raise UnusableModel(
            f"--terms: is {str(wanted.terms)!r}, must not be given for sm_90, where no kernel "
            "depends on it; leave it out"
        )
    model, sms, specs = wanted.mixture.dense, wanted.sms, _sm90_linear_kernels(wanted)
    if wanted.batch_invariant:
        return specs  # all else is vLLM's
    if model.attention is not None:
        specs |= norm_rotary_kernels(model.hidden, model.attention, model.dtype)
        for cache in caches_of(wanted, CacheName.auto):  # FP8 is on request
            specs |= decode_kernels(
                model.attention, model.dtype, page_size=wanted.page_size, fp8=cache == "fp8",
                sms=sms,
            )  # fmt: skip
    for experts, of_model in product(wanted.mixture.experts, wanted.of_model):
        inputs: ExpertInputs = "16-bit"
        if wanted.activation is ActivationName.fp8:
            inputs = "fp8-static" if of_model.activation == "static" else "fp8-per-token"
        specs |= _experts_kernels(experts.served("sm_90", inputs, 1), "sm_90", wanted)
    return specs


def _sm90_linear_kernels(wanted: Wanted) -> dict[KernelSpec, list[str]]:
    """Kernels of linear layers and, for FP8 activations, of their inputs and of norms."""
    model = wanted.mixture.dense
    how: dict[str, Any] = {
        "max_tokens": wanted.max_tokens,
        "batch_invariant": wanted.batch_invariant,
        "sms": wanted.sms,
    }
    specs: dict[KernelSpec, list[str]] = {}
    for inputs in wanted.of_model:
        static = inputs.activation == "static"
        if wanted.activation is not ActivationName.fp8:
            specs |= weight_only_kernels(model, **how)
            continue
        layers = quantizing_mlps(model, 1) if static and model.hidden else model
        specs |= fp8_kernels(layers, per_token=not static, **how)
        if model.hidden:
            sizes = model.dtype, model.dtype, model.hidden, not static
            specs |= {spec: ["norms"] for spec in fp8_norm_kernels(*sizes)}
    return specs


def _sm100_kernels(wanted: Wanted) -> dict[KernelSpec, list[str]]:
    """Kernels of linear layers, experts and their inputs, norms, attention, rotary and KV store.

    Raises:
        UnusableModel: the option for activations is one for sm_90.
    """
    if wanted.activation is not None and wanted.activation.is_option:
        raise UnusableModel(
            f"--activation: is {str(wanted.activation)!r}, must be static, per-token or both for "
            "sm_100, which multiplies NVFP4; leave it out for what the model says"
        )
    model, sms, tokens = wanted.mixture.dense, wanted.sms, wanted.max_tokens
    specs: dict[KernelSpec, list[str]] = {}
    for activation, terms in inputs_of(wanted):
        static = activation == "static"
        layers = quantizing_mlps(model, terms) if static and model.hidden else model
        specs |= block_scaled_kernels(
            layers, max_tokens=tokens, activations=(activation,), terms=terms,
            batch_invariant=wanted.batch_invariant, sms=sms,
        )  # fmt: skip
        if model.hidden:
            specs |= norm_kernels(
                model.dtype, model.dtype, model.hidden, max_tokens=tokens, per_token=not static,
                terms=terms, batch_invariant=wanted.batch_invariant, sms=sms,
            )  # fmt: skip
        for experts in wanted.mixture.experts:
            served = experts.served("sm_100", activation, terms)
            specs |= _experts_kernels(served, "sm_100", wanted)
    if model.attention is not None:
        caches = caches_of(wanted, CacheName.both)
        specs |= rotary_store_kernels(
            model.attention, model.dtype, max_tokens=tokens, caches=caches,
            page_size=wanted.page_size, sms=sms,
        )  # fmt: skip
        for quantized in {hands_over(model.attention, *inputs) for inputs in inputs_of(wanted)}:
            specs |= attention_kernels(
                model.attention, model.dtype, caches=caches, page_size=wanted.page_size, sms=sms,
                quantized=quantized, rotates=True, batch_invariant=wanted.batch_invariant,
            )  # fmt: skip
    return specs


def caches_of(wanted: Wanted, default: CacheName) -> tuple[Cache, ...]:
    """Dtypes of the KV cache to build for; ``default``: without an option."""
    name = wanted.kv_cache or default
    return tuple(cache for cache in CACHES if name in (cache, CacheName.both))


def _experts_kernels(experts: Experts, family: str, wanted: Wanted) -> dict[KernelSpec, list[str]]:
    """Kernels of an MoE layer, each with the parts of the layer that the kernel serves."""
    specs = experts_kernels(experts, family, max_tokens=wanted.max_tokens, sms=wanted.sms)
    return {spec: [f"experts' {part}" for part in parts] for spec, parts in specs.items()}


def inputs_of(wanted: Wanted) -> list[Inputs]:
    """Quantisation of layer inputs: by the options or, where not given, by the model's config."""
    given = tuple(a for a in ACTIVATIONS if wanted.activation in (a, ActivationName.both))
    found = [
        Inputs(activation, wanted.terms or inputs.terms)
        for inputs in wanted.of_model
        for activation in (given or (inputs.activation,))
    ]
    return list(dict.fromkeys(found))


# By architecture family.
KERNELS = {"sm_90": _sm90_kernels, "sm_100": _sm100_kernels}


def which_model(
    model: Path | None,
    linear: list[str],
    gate_up: list[str],
    parallel: Parallel,
    dtype: DtypeName | None,
    fuse_mlp: bool,
) -> tuple[Mixture, tuple[Inputs, ...]]:
    """Layers of the model or of the given sizes, and the quantisation of their inputs."""
    if (model is None) == (not linear and not gate_up):
        raise UnusableModel(
            "MODEL: give a model's config.json, or sizes with --linear N,K and --gate-up N,K; one "
            "of the two"
        )
    if model is None:
        for option, gpus in zip(("--tensor-parallel", "--expert-parallel"), parallel, strict=True):
            if gpus != 1:
                raise UnusableModel(
                    f"{option}: goes with a model; give --linear and --gate-up one GPU's sizes"
                )
        return Mixture(explicit(linear, gate_up, dtype_of(dtype)), (), ""), EITHER
    config = load_config(model)
    inputs = quantized_inputs(config.quantization)
    if number_of_experts(config):
        return read_mixture(
            config, tensor_parallel=parallel.tensor, expert_parallel=parallel.expert,
            dtype=dtype_of(dtype), fuse_mlp=fuse_mlp,
        ), inputs  # fmt: skip
    if parallel.expert != 1:
        raise UnusableModel(
            f"--expert-parallel: is {parallel.expert}, must be 1 for {config.name}, which has no "
            "experts; leave it out"
        )
    dense = dense_model(
        config, tensor_parallel=parallel.tensor, dtype=dtype_of(dtype), fuse_mlp=fuse_mlp
    )
    return Mixture(dense, (), ""), inputs
