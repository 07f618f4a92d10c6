"""Selection of the linears of a model to quantise."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from vllm_fp4_plugin.ignore import matches
from vllm_fp4_plugin.quantizer.errors import QuantizerError
from vllm_fp4_plugin.quantizer.experts import ExpertsLayer, check_blocks, find_experts
from vllm_fp4_plugin.quantizer.layout import Layout, read_layout
from vllm_fp4_plugin.quantizer.source import FLOAT_DTYPES, Source
from vllm_fp4_plugin.quantizer.stored import StoredWeight

# Inference engines fuse each group to one matrix.
_GATE_UP = (("gate_proj", "up_proj"), ("w1", "w3"))
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    *_GATE_UP,
)

# MLA engines multiply this weight into other matrices, which needs its values, not a GEMM.
_ABSORBED = "kv_b_proj"

# Name parts of routers, and of the gate that weighs a shared expert.
_ROUTERS = {"gate", "router", "shared_expert_gate"}


@dataclass(frozen=True)
class Selection:
    """Linears of a model, each named as the module in the quantised checkpoint.

    Attributes:
        quantized: linears to quantise, with the location of each weight.
        kept: linears that stay unquantised.
        ignore: ignore list of the quantised checkpoint's config.
        fused: for each quantised linear, all linears of its fused matrix, itself included.
        modules: model-side name of each quantised linear that is a module of the model; linears of
            experts are not.
        experts: all layers of experts, quantised or not.
        layout: map between the model's tensors and the checkpoint's.
    """

    quantized: dict[str, StoredWeight]
    kept: list[str]
    ignore: list[str]
    fused: dict[str, list[str]]
    modules: dict[str, str]
    experts: list[ExpertsLayer]
    layout: Layout

    @property
    def gate_up(self) -> dict[str, list[str]]:
        """Entries of ``fused`` for gate and up projections."""
        leaves = {leaf for pair in _GATE_UP for leaf in pair}
        return {n: with_ for n, with_ in self.fused.items() if n.rpartition(".")[2] in leaves}


class _EmptyOnMeta(TorchFunctionMode):
    """Mode in which ``torch.empty``, used for the parameters of layers, allocates nothing.

    ``torch.zeros`` with three sizes, used for some stacks of experts, allocates nothing either.
    Unlike under ``torch.device("meta")``, buffers that are computed from the config and stored in
    no checkpoint, such as rotary frequencies, have values.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty or (func is torch.zeros and len(args) == 3):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build_model(source: Source) -> Any:
    """Build the model of a checkpoint in bfloat16; parameters of layers have no storage.

    Raises:
        QuantizerError: transformers cannot build a decoder from ``config.json``.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source.folder, local_files_only=True)
        with _EmptyOnMeta():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # transformers' config validators raise exceptions of their own
        raise QuantizerError(
            f"src: transformers cannot build the model that config.json describes ({error}); "
            "give a decoder that AutoModelForCausalLM supports"
        ) from error
    return model.eval()


def select_linears(
    model: nn.Module, source: Source, ignore: Sequence[str], *, lm_head: bool = False
) -> Selection:
    """Select the linears of ``model`` to quantise; all others stay unquantised.

    The others are: linears outside the decoder layers (except, with ``lm_head``, the head),
    routers, gates of shared experts, ``kv_b_proj``, which MLA absorbs, and linears that a pattern
    of ``ignore`` covers: a name, a ``*`` wildcard or ``re:<regex>``, see ``ignore.matches``. The
    patterns must cover a layer of experts, or a group of linears that engines fuse, whole or not
    at all.

    Raises:
        QuantizerError: the message names a pattern that covers no linear or only a part, or a
            tensor that cannot be quantised.
    """
    layout = read_layout(model, source)
    modules = dict(model.named_modules())
    lengths = {f"{n}.": len(m) for n, m in modules.items() if isinstance(m, nn.ModuleList)}
    _refuse_layers_beyond(lengths, layout, source)
    layers = find_experts(model, layout, source)
    routers = _routers(modules, layers)
    linears = {n: m for n, m in modules.items() if isinstance(m, nn.Linear)}
    head = _head(model, linears) if lm_head else None
    candidates = {n for n in linears if n.startswith(tuple(lengths)) and n not in routers} - {
        n for n in linears if n.endswith(f".{_ABSORBED}")
    }
    stored = {n: _stored_name(n, layout) for n in linears}
    experts = {name: weight for layer in layers for name, weight in layer.linears()}
    _check_ignore(ignore, [*stored.values(), *experts])
    chosen = {
        stored[n]: n
        for n in linears
        if (n in candidates or n == head) and not matches(stored[n], ignore)
    }
    quantized = {
        name: _check_linear(name, linears[n], n, layout, source) for name, n in chosen.items()
    }
    kept_layers = [layer for layer in layers if _is_ignored(layer, ignore)]
    for layer in layers:
        if layer not in kept_layers:
            check_blocks(layer)
            quantized |= dict(layer.linears())
    if not quantized:
        raise QuantizerError(
            f"src: no linear to quantise among {len(linears)} of "
            f"{type(model).__name__}; ignore fewer, or give another architecture"
        )
    names = {*stored.values(), *experts}
    kept = [name for name in (*stored.values(), *experts) if name not in quantized]
    further = [*map(layout.module, routers - linears.keys()), *(la.name for la in kept_layers)]
    return Selection(
        quantized=quantized,
        kept=kept,
        ignore=[*kept, *sorted(further), *_unknown_matrices(layout, source)],
        fused={n: _fused_with(n, names, quantized) for n in quantized},
        modules=chosen,
        experts=layers,
        layout=layout,
    )


def _stored_name(name: str, layout: Layout) -> str:
    """Checkpoint name of a linear."""
    return layout.tensors.get(f"{name}.weight", f"{name}.weight").removesuffix(".weight")


def _check_ignore(ignore: Sequence[str], names: Sequence[str]) -> None:
    for pattern in ignore:
        if not any(matches(name, [pattern]) for name in names):
            raise QuantizerError(
                f"ignore: {pattern!r} covers no linear; the model names them like "
                f"{next(iter(names), 'nothing')}"
            )


def _is_ignored(layer: ExpertsLayer, ignore: Sequence[str]) -> bool:
    """Whether the patterns of ``ignore`` cover a layer of experts.

    Raises:
        QuantizerError: the patterns cover only a part of the layer.
    """
    names = [name for name, _ in layer.linears()]
    kept = [name for name in names if matches(name, ignore)]
    if kept and len(kept) < len(names):
        other = next(name for name in names if name not in kept)
        raise QuantizerError(
            f"ignore: covers {kept[0]} but not {other}, and engines take a layer of experts whole; "
            f"give {layer.name}, or a pattern that covers none of it"
        )
    return bool(kept)


def _routers(modules: dict[str, nn.Module], layers: Sequence[ExpertsLayer]) -> set[str]:
    """Model-side names of routers, and of the gates that weigh shared experts."""
    found = set()
    for layer in layers:
        block = f"{layer.module.rpartition('.')[0]}."
        for name, module in modules.items():
            if not name.startswith(block) or name == layer.module:
                continue
            weight = module._parameters.get("weight")
            is_router = not _ROUTERS.isdisjoint(name.removeprefix(block).split("."))
            if is_router and weight is not None and weight.ndim == 2:
                found.add(name)
    return found


def _unknown_matrices(layout: Layout, source: Source) -> list[str]:
    """Modules with a 2-D weight, perhaps linears, that the model lacks, such as further heads."""
    return [n for n in layout.unknown_modules() if len(source.specs[f"{n}.weight"].shape) == 2]


def _head(model: Any, linears: dict[str, nn.Linear]) -> str:
    """Model-side name of the linear that computes the logits.

    Raises:
        QuantizerError: the head is tied to the embedding, or is no linear.
    """
    if getattr(model.config, "tie_word_embeddings", False):
        raise QuantizerError(
            "lm_head: is the embedding (tie_word_embeddings), must have weights of its own; "
            "leave out --lm-head"
        )
    head = model.get_output_embeddings()
    names = [name for name, linear in linears.items() if linear is head]
    if not names:
        raise QuantizerError(
            f"lm_head: {type(model).__name__} has no linear that gives the logits; leave out "
            "--lm-head"
        )
    return names[0]


def _refuse_layers_beyond(lengths: dict[str, int], layout: Layout, source: Source) -> None:
    """Refuse a checkpoint with more layers than the model: further layers would stay unquantised.

    ``lengths``: number of modules in each list of the model, by prefix of the modules' names.
    """
    if source.config.get("num_nextn_predict_layers"):
        return  # MTP layers follow the decoder's, and transformers builds no MTP layers
    for name, target in layout.targets.items():
        for prefix, length in lengths.items():
            number = target.removeprefix(prefix).partition(".")[0]
            if target.startswith(prefix) and number.isdecimal() and int(number) >= length:
                raise QuantizerError(
                    f"{name}: the checkpoint has it, config.json asks for {length} of {prefix}*; "
                    "mend its number of layers"
                )


def _check_linear(
    name: str, linear: nn.Linear, module: str, layout: Layout, source: Source
) -> StoredWeight:
    weight, shape = f"{name}.weight", (linear.out_features, linear.in_features)
    keep = f"keep such weights as they are with --ignore {name.rpartition('.')[2]}"
    if f"{module}.weight" not in layout.tensors:
        raise QuantizerError(
            f"{weight}: the model has it, the checkpoint does not; save it anew with the "
            "transformers version in use"
        )
    spec = source.specs[weight]
    if spec.shape != shape:
        raise QuantizerError(
            f"{weight}: shape is {spec.shape}, config.json asks for {shape}; mend config.json"
        )
    if spec.dtype not in FLOAT_DTYPES:
        raise QuantizerError(
            f"{weight}: dtype is {spec.dtype}, must be {', '.join(FLOAT_DTYPES)}; convert it, "
            f"or {keep}"
        )
    if shape[1] % BLOCK_SIZE:
        raise QuantizerError(
            f"{weight}: K is {shape[1]}, must be a multiple of {BLOCK_SIZE}; {keep}"
        )
    return StoredWeight(weight, shape)


def _fused_with(name: str, linears: Container[str], quantized: Container[str]) -> list[str]:
    parent, _, leaf = name.rpartition(".")
    group = next((g for g in _FUSED if leaf in g), (leaf,))
    names = (f"{parent}.{part}" if parent else part for part in group)
    members = [name for name in names if name in linears]
    for member in members:
        if member not in quantized:
            raise QuantizerError(
                f"ignore: covers {member} but not {name}, which engines fuse into one matrix; "
                "ignore both or neither"
            )
    return members
