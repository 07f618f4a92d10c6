"""Choice of the linears of a model that are quantised."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nvfp4_kernels.nvfp4 import BLOCK_SIZE
from vllm_fp4_plugin.ignore import matches
from vllm_fp4_plugin.quantizer.errors import QuantizerError
from vllm_fp4_plugin.quantizer.source import Source

FLOAT_DTYPES = ("BF16", "F16", "F32")

# Inference engines make one matrix of each of these.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Selection:
    """Linears of a model, by module name.

    Attributes:
        quantized: linears that become NVFP4.
        kept: linears that stay as they are.
        fused: the linears, itself included, that share a matrix with each quantised one.
    """

    quantized: list[str]
    kept: list[str]
    fused: dict[str, list[str]]


class _EmptyOnMeta(TorchFunctionMode):
    """Mode in which ``torch.empty``, of which layers make their parameters, allocates nothing.

    Unlike under ``torch.device("meta")``, buffers computed from the config (rotary frequencies,
    embedding scales) are real, and they are in no checkpoint.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build_model(source: Source) -> Any:
    """Build the model of a checkpoint in bfloat16, its large parameters without storage.

    Raises:
        QuantizerError: transformers knows no decoder of that architecture.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source.folder, local_files_only=True)
        with _EmptyOnMeta():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # its validators have exceptions of their own
        raise QuantizerError(
            f"src: transformers cannot build the model that config.json describes ({error}); "
            "give a decoder that AutoModelForCausalLM supports"
        ) from error
    return model.eval()


def select_linears(
    model: nn.Module, source: Source, ignore: Sequence[str], *, lm_head: bool = False
) -> Selection:
    """Divide the linears of ``model`` into those to quantise and those to keep.

    Linears outside the decoder layers are kept, with ``lm_head`` but for the one that gives the
    logits, as are those that a pattern of ``ignore`` covers: a name, a ``*`` wildcard or
    ``re:<regex>``, see ``ignore.matches``.

    Raises:
        QuantizerError: naming the pattern that covers no linear, or the tensor that cannot be
            quantised.
    """
    _refuse_experts(source)
    modules = dict(model.named_modules())
    lengths = {f"{n}.": len(m) for n, m in modules.items() if isinstance(m, nn.ModuleList)}
    _refuse_layers_beyond(lengths, source)
    stacks = tuple(lengths)
    linears = {n: m for n, m in modules.items() if isinstance(m, nn.Linear)}
    for pattern in ignore:
        if not any(matches(name, [pattern]) for name in linears):
            raise QuantizerError(
                f"ignore: {pattern!r} covers no linear; the model names them like "
                f"{next(iter(linears), 'nothing')}"
            )
    head = _head(model, linears) if lm_head else None
    quantized = [
        n for n in linears if (n.startswith(stacks) or n == head) and not matches(n, ignore)
    ]
    if not quantized:
        raise QuantizerError(
            f"src: no linear to quantise among {len(linears)} of "
            f"{type(model).__name__}; ignore fewer, or give another architecture"
        )
    chosen = set(quantized)
    for name in quantized:
        _check_linear(name, tuple(linears[name].weight.shape), source)
    return Selection(
        quantized=quantized,
        kept=[n for n in linears if n not in chosen],
        fused={n: _fused_with(n, linears, chosen) for n in quantized},
    )


def _head(model: Any, linears: dict[str, nn.Linear]) -> str:
    """Name of the linear that gives the logits."""
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


def _refuse_experts(source: Source) -> None:
    for name in source.specs:
        if ".experts." in name:
            raise QuantizerError(
                f"{name}: belongs to a mixture of experts, only dense models are supported; "
                "quantise it with its producer's tool"
            )


def _refuse_layers_beyond(lengths: dict[str, int], source: Source) -> None:
    """Refuse layers beyond ``lengths`` of stacks, by prefix, which would stay unquantised."""
    if source.config.get("num_nextn_predict_layers"):
        return  # those follow the decoder's own, and transformers builds none of them
    for name in source.specs:
        for prefix, length in lengths.items():
            number = name.removeprefix(prefix).partition(".")[0]
            if name.startswith(prefix) and number.isdecimal() and int(number) >= length:
                raise QuantizerError(
                    f"{name}: the checkpoint has it, config.json asks for {length} of {prefix}*; "
                    "mend its number of layers"
                )


def _check_linear(name: str, shape: tuple[int, ...], source: Source) -> None:
    weight = f"{name}.weight"
    keep = f"keep such weights as they are with --ignore {name.rpartition('.')[2]}"
    spec = source.specs.get(weight)
    if spec is None:
        raise QuantizerError(
            f"{weight}: the model has it, the checkpoint does not; save it anew with the "
            "transformers version in use"
        )
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


def _fused_with(name: str, linears: dict[str, Any], quantized: set[str]) -> list[str]:
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
