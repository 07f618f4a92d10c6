"""Calibration: the largest input of every linear, from text run through a model module by module.

A module's parameters are loaded from the checkpoint when the module's forward pass starts, and
dropped when that pass ends.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_kernels.formats.nvfp4 import E4M3_MAX, GLOBAL_RANGE
from vllm_fp4_plugin.kernel_weight import MAX_GLOBAL, MIN_GLOBAL
from vllm_fp4_plugin.quantizer.errors import QuantizerError
from vllm_fp4_plugin.quantizer.expert_calibration import StreamedExperts
from vllm_fp4_plugin.quantizer.layout import Layout
from vllm_fp4_plugin.quantizer.linears import Selection
from vllm_fp4_plugin.quantizer.maxima import Maxima, as_tensors, raise_maximum
from vllm_fp4_plugin.quantizer.source import Source
from vllm_fp4_plugin.quantizer.stored import ignoring

# Tokens per batch: the weights are read once per batch, the activations stay small.
_BATCH_TOKENS = 8192


@dataclass
class Ranges:
    """Maxima seen in calibration, each float32 ``()`` on the CPU.

    Attributes:
        inputs: max|input| of each linear; an expert's linears count all tokens, including tokens
            routed to other experts.
        keys: max|key| of each attention module, as cached: after the norm and the rotary embedding.
        values: max|value| of each attention module, as cached.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    keys: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)


def batch_count(sequences: Tensor) -> int:
    """Number of batches that ``calibrate`` runs."""
    return len(_batches(sequences))


@torch.no_grad()
def calibrate(
    model: Any,
    source: Source,
    selection: Selection,
    sequences: Tensor,
    *,
    record_kv: bool,
    on_linear: Callable[[], None],
) -> Ranges:
    """Run ``sequences`` through the decoder of ``model``; record max|input| of the linears.

    Args:
        model: model from ``linears.build_model``; runs in bfloat16, on CUDA if available.
        source: checkpoint with the model's parameters.
        selection: the linears to measure, and the layers of experts.
        sequences: int64 ``(sequences, seq_len)`` token ids.
        record_kv: whether to record also max|key| and max|value| of each attention module's cache.
        on_linear: called once per linear and batch, for a progress bar.

    Raises:
        QuantizerError: a linear saw no input; a maximum is 0, not finite or out of range; the
            tokens or the parameters do not fit the model; the model does not cache keys and values
            (with ``record_kv``).
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _check_tokens(model, sequences)
    inputs: Maxima = {}
    keys: Maxima = {}
    values: Maxima = {}
    _refuse_latent_cache(model, record_kv)
    _stream_experts(model, source, selection, device, inputs, on_linear)
    _map_parameters(model, source, selection, device)
    for name, module in selection.modules.items():
        _record_input(model.get_submodule(module), name, inputs, on_linear)
    decoder = _decoder(model)
    head = next((n for n, module in selection.modules.items() if _is_head(model, module)), None)
    for batch in _batches(sequences):
        # A new cache for each batch: some layers would continue from its contents.
        cache = _recording_cache(model, selection.layout, keys, values) if record_kv else None
        output = decoder(batch.to(device), use_cache=record_kv, past_key_values=cache)
        if head is not None:
            raise_maximum(inputs, head, output.last_hidden_state)
            on_linear()
    for name in selection.quantized:
        if name not in inputs:
            raise QuantizerError(
                f"{name}: saw no input during calibration; leave it as it is with "
                f"{ignoring(selection.fused[name])}"
            )
    if record_kv and not keys:
        raise QuantizerError(
            f"kv_cache_scheme: {type(model).__name__} caches no keys; leave out --kv-cache-scheme"
        )
    for name, amax in inputs.items():
        remedy = f"leave it as it is with {ignoring(selection.fused[name])}"
        _check_range(name, amax, GLOBAL_RANGE, remedy)
    for cached, found in (("keys", keys), ("values", values)):
        for name, amax in found.items():
            _check_range(f"{name}, {cached}", amax, E4M3_MAX, "leave out --kv-cache-scheme")
    return Ranges(as_tensors(inputs), as_tensors(keys), as_tensors(values))


def _decoder(model: Any) -> Any:
    """Part of ``model`` that returns hidden states, without logits."""
    # Llama 4 names its decoder by a prefix that only its multimodal model has.
    return getattr(model, "model", model) if model.base_model is model else model.base_model


def _refuse_latent_cache(model: Any, record_kv: bool) -> None:
    if record_kv and getattr(model.config, "kv_lora_rank", None):
        raise QuantizerError(
            f"kv_cache_scheme: {type(model).__name__} caches latent vectors, no keys and values; "
            "leave out --kv-cache-scheme"
        )


def _stream_experts(
    model: Any,
    source: Source,
    selection: Selection,
    device: torch.device,
    found: Maxima,
    on_linear: Callable[[], None],
) -> None:
    """Make each layer of experts load and run one expert at a time."""
    for layer in selection.experts:
        recorded = found if layer.linear(0, layer.last) in selection.quantized else None
        StreamedExperts(layer, source, device, recorded, on_linear).replace_forward_in(model)


def _is_head(model: Any, name: str) -> bool:
    """Whether a linear is the head, which calibration does not run, as it follows the decoder."""
    return model.get_submodule(name) is model.get_output_embeddings()


def _batches(sequences: Tensor) -> tuple[Tensor, ...]:
    return sequences.split(max(1, _BATCH_TOKENS // sequences.shape[1]))


def _check_tokens(model: Any, sequences: Tensor) -> None:
    vocabulary = model.get_input_embeddings().num_embeddings
    if int(sequences.max()) >= vocabulary:
        raise QuantizerError(
            f"src: its tokenizer gives token {int(sequences.max())}, its model knows {vocabulary}; "
            "use the tokenizer the model was trained with"
        )
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and sequences.shape[1] > limit:
        raise QuantizerError(
            f"seq_len: is {sequences.shape[1]}, the model takes at most {limit}; lower --seq-len"
        )


def _check_range(name: str, amax: float, largest: float, remedy: str) -> None:
    """Raise unless the scale ``amax / largest`` is in the range that the plugin serves."""
    lower, upper = MIN_GLOBAL * largest, MAX_GLOBAL * largest
    if not lower <= amax <= upper:  # also false for NaN
        raise QuantizerError(
            f"{name}: the largest magnitude seen during calibration is {amax}, must be "
            f"positive, between {lower:.1e} and {upper:.1e}; use other text, or {remedy}"
        )


def _map_parameters(model: Any, source: Source, selection: Selection, device: torch.device) -> None:
    base, stored = _decoder(model), selection.layout.tensors
    prefix = next(name for name, module in model.named_modules() if module is base)
    experts = {layer.module for layer in selection.experts}
    for path, module in base.named_modules(prefix=prefix):
        for key, buffer in module._buffers.items():
            if buffer is not None:
                # Computed buffers are in no checkpoint.
                name = stored.get(f"{path}.{key}")
                module._buffers[key] = (source.load(name) if name else buffer).to(device)
        if path in experts:
            continue
        names = {}
        for key in (key for key, p in module._parameters.items() if p is not None):
            if f"{path}.{key}" not in stored:
                raise QuantizerError(
                    f"{path}.{key}: the model has it, the checkpoint does not; save the checkpoint "
                    "anew with the transformers version in use"
                )
            names[key] = stored[f"{path}.{key}"]
        if names:
            user = path.rpartition(".")[0] if isinstance(module, nn.Conv1d) else path
            _map_while_running(module, model.get_submodule(user), names, source, device)


def _map_while_running(
    module: nn.Module,
    user: nn.Module,
    names: dict[str, str],
    source: Source,
    device: torch.device,
) -> None:
    """Load the parameters of ``module`` before each forward pass of ``user``; drop them after.

    Args:
        module: module that owns the parameters.
        user: ``module``, or the mixer that reads the parameters without calling ``module``.
        names: checkpoint name of each parameter, by the parameter's name in ``module``.
        source: checkpoint with the parameters.
        device: device to load to.
    """
    if isinstance(module, nn.Embedding):
        # Some models move the tokens to the device of this weight before the module runs.
        nowhere = torch.empty(0, dtype=torch.bfloat16, device=device)
        module._parameters["weight"] = nn.Parameter(nowhere, requires_grad=False)
    empty = dict(module._parameters)
    dtypes = {key: p.dtype for key, p in empty.items() if p is not None}

    def load(user: nn.Module, args: Any) -> None:
        for key, name in names.items():
            # Mostly bfloat16, but some routers compute in float32.
            stored = source.load(name).to(device, dtypes[key])
            module._parameters[key] = nn.Parameter(stored, requires_grad=False)

    def drop(user: nn.Module, args: Any, output: Any) -> None:
        module._parameters.update(empty)

    user.register_forward_pre_hook(load)
    user.register_forward_hook(drop)


def _record_input(
    module: nn.Module, name: str, found: Maxima, on_linear: Callable[[], None]
) -> None:
    def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        raise_maximum(found, name, args[0])
        on_linear()

    module.register_forward_pre_hook(record)


def _recording_cache(model: Any, layout: Layout, keys: Maxima, values: Maxima) -> Any:
    """Make a key/value cache that only records max|key| and max|value| of each attention module."""
    from transformers import DynamicCache

    # An attention module comes after its layer, which may have the same index.
    attention = {
        module.layer_idx: layout.module(name)
        for name, module in model.named_modules()
        if getattr(module, "layer_idx", None) is not None
    }

    class RecordingCache(DynamicCache):
        def update(
            self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            raise_maximum(keys, attention[layer_idx], key)
            raise_maximum(values, attention[layer_idx], value)
            return key, value

    return RecordingCache(config=model.config)
